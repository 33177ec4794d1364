"""Sums of clipped per-example gradients, computed by layer rules for vectorized clients.

A pass runs a model once on a padded batch: the rows of K clients, R rows each. Known layers run
their rule (`layers`) on each client's own parameters; every other use of parameters runs through
`torch.func` (`fallback`). `choice` tries a model on public examples to find the parts that need
`torch.func`.
"""
