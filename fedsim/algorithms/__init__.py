"""Federated algorithms, each with the methods `init`, `client` and `server` over a `ServerState`.

`algorithm.py` has the base class, `built_in/` one file for each built-in algorithm.
"""
