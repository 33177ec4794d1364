"""A federation on real processes: the simulator's apps under Flower's SuperLink and SuperNodes.

`flower_app` writes an experiment as a Flower app. That app runs `server_app` beside the SuperLink
and `client_app` on every SuperNode. `node_state` is the state of a node on disk.
"""
