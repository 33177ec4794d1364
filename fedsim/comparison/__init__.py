"""`fedsim compare`: runs variants of one experiment with the same seeds and compares the results.

Two variants are compared by pairs of runs with the same seed. Both runs of a pair have the same
partitions, initial model and participants, so the noise between seeds does not hide the difference
of the variants. This `__init__` imports nothing, so that the command line starts at once.
"""
