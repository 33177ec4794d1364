"""Rényi differential privacy: the RDP curve of each mechanism, and conversion to (ε, δ)."""
