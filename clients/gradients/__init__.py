"""Sums of clipped per-example gradients, for one client or for several clients at once.

A pass runs a model once on a padded batch, which holds R rows (examples or zeros) of each of K
clients. A known layer runs its layer rule (`layers`) on each client's own parameters. All other
modules run through `torch.func` (`fallback`). `choice` tries a model on public examples to find
the modules that need `torch.func`.
"""
