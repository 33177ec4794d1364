"""Rényi differential privacy: curves of each mechanism, and conversion to (ε, δ)."""
