"""Engines, which execute a federation in one process or in several."""
