"""Loaders of the built-in datasets."""
