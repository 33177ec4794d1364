"""`fedsim compare`: variants of one experiment, run with the same seeds, and what differs.

Variants are paired by seed: the same partitions, initial model and participants, so that the
difference of two variants is not buried under the difference of two seeds. The package imports
nothing by itself, because the command line imports `command` from it and must answer at once.
"""
