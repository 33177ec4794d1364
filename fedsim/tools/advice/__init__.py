"""Advice before training: settings that promise less noise for the same ε, from public facts."""
