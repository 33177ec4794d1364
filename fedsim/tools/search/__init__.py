"""A charged search: a secret, random number of runs, of which the best model alone is released.

The number of runs is drawn once and charged before the first run (Papernot, Steinke 2022). Two
figures are kept apart: all runs composed, for the server and the clients, who saw every run; and
the selection, for an observer of nothing but the selected model. The package itself imports
nothing.
"""
