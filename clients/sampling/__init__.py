"""Samplings: which examples enter a step, and the event that the step is charged as."""
