"""Builds a federation from an experiment: its clients, its server and its privacy plan."""
