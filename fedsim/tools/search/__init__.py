"""A charged search: a secret, random number of runs, of which only the best model is released.

The number of runs is drawn once and charged before the first run (Papernot, Steinke 2022). There
are two separate guarantees: of all runs composed, for the server and the clients, who saw every
run; and of the selection, for an observer of only the selected model. The package itself imports
nothing.
"""
