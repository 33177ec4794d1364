"""Secure aggregation: the sum of the clients' updates, and no single update.

`settings` says what is wanted; `encoding`, `layout` and `payload` turn an update into a vector over
Z_2^b; `additive`, `leader` and `helper` share and open it among aggregators; `shamir`, `graph`,
`pairwise` and `masked_sum` do it with one server. Nothing here knows Flower or torch.
"""
