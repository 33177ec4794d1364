"""Charged search: a secret, random number of runs, of which only the best model is released.

The number of runs is drawn once and charged before the first run (Papernot, Steinke 2022). There
are two separate guarantees. One is for all runs together, against the server and the clients, who
saw every run. The other is for the selection, against an observer who sees only the selected model.
This `__init__` imports nothing.
"""
