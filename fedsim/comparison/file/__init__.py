"""The comparison file: its settings, its variants, and the loading with every mistake at once."""
