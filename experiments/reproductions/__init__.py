"""Published results, measured again: `python -m experiments.reproductions` in a checkout.

`studies/` has a module for each publication, with its settings and the lines of the authors' code
that they come from. `files/` has experiment files that `fedsim run` and `fedsim compare` read as
they stand. `docs/reproductions.md` shows the records in `results/`.

To add a publication, write a module with `STUDIES`, a function that returns rows of `rows.py`, and
its experiment files.
"""
