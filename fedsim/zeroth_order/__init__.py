"""Zeroth-order steps (from loss differences): settings and public random directions."""
