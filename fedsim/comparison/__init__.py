"""`fedsim compare`: variants of one experiment, run with the same seeds and compared in pairs.

A pair is the runs of two variants with the same seed. Both runs share partitions, initial model and
participants, so the noise between seeds does not hide the difference of the variants. The package
itself imports nothing: the command line imports `command` from it and must start at once.
"""
