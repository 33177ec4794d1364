"""Advice before training: proposes settings that have a smaller predicted error at the same ε."""
