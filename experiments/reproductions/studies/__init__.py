"""One module for each publication; its `STUDY` is found by scanning this directory."""
