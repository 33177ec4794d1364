"""Tools that use the simulator: advice, audit, deployment, search, totals, curves and replay.

The commands of a tool are in the front of its package. Slow imports wait until a command runs.
"""
