"""Clipping: the bounds of an example's contribution, fixed or learnt."""
