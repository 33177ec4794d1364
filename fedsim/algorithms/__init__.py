"""Federated algorithms: `init`, `client` and `server` over one `ServerState`.

`algorithm.py` has the class, `built_in/` one file for each algorithm of fedsim.
"""
