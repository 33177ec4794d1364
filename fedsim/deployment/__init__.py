"""A federation outside of the simulator: the same apps under Flower's SuperLink and SuperNodes.

`flower_app` writes an experiment as a Flower app; `server_app` and `client_app` are what that app
runs on the SuperLink's side and on every SuperNode; `node_state` is what a node keeps on disk.
"""
