"""Sums of clipped per-example gradients, for one client or for several clients at once.

The model runs once, forwards and backwards, on a padded batch: R rows (examples or zeros) of each
of K clients, each client with separate parameter values. Common layer types have a layer rule,
which is code in `layers` that computes their per-example gradients. Modules without a rule run
through `torch.func` (`recording`). `choice` tries a model on public examples to find these modules.
"""
