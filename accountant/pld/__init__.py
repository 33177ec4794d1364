"""Privacy loss distributions: exact composition by FFT."""
