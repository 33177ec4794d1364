"""A run: from an experiment to a finished directory, its continuation, and its check."""
