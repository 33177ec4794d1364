"""Deployed federations: the simulator's apps under Flower's SuperLink and SuperNodes.

`flower_app` writes an experiment as a Flower app. That app runs `server_app` next to the SuperLink
and `client_app` on every SuperNode. `node_state` keeps the state of a node on disk.
"""
