"""Shared by all rooms: base of settings, errors, keyed random streams, plug-ins, number formats."""
