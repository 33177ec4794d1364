"""Checks that a model and a loss treat each example independently of all others."""
