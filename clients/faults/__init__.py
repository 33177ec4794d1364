"""Injected client faults: crashes, delays and broken updates."""
