"""Advice before training: settings with less predicted error at the same ε."""
