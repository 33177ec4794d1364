"""One module for each publication; its `STUDIES`, by name, are found by scanning."""
