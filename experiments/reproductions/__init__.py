"""Published results, measured again: `python -m experiments.reproductions` in a checkout.

`studies/` has a module for each publication and, where an experiment file can express the result,
the files that `fedsim run` and `fedsim compare` read as they stand.
"""
