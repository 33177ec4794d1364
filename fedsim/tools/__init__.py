"""Tools that use the simulator: advice, audit, deployment, search, totals, curves and replay."""
