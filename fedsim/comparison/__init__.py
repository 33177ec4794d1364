"""`fedsim compare`: variants of one experiment, run with the same seeds and compared in pairs.

Variants are paired by seed: they share partitions, initial model and participants, so that the
noise between seeds does not hide the difference of two variants. The package itself imports
nothing: the command line imports `command` from it and must start at once.
"""
