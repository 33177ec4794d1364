"""Sums of clipped per-example gradients, by one table of layer rules on stacked tensors.

A pass runs a model once on a tile: the rows of K clients, R rows each. Known layers run their rule
(`layers`) on each client's own parameters; every other use of parameters runs through `torch.func`
(`fallback`). `choice` tries a model on public examples and finds out which parts need that.
"""
