"""Privacy loss distributions (PLD): exact composition of privacy losses by FFT."""
