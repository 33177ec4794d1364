"""Privacy totals of clients: ε over several runs and ledgers, also ledgers of other tools.

| module | what it does |
|---|---|
| `sources.py` | reads run directories and ledgers, also of other tools and the registry |
| `training.py` | reads training files: what code of others does, and what its authors claim |
| `totals.py` | finds which clients of several runs are the same, and composes their ledgers |
| `outputs.py` | prints totals, and drafts an entry of the public registry of deployments |
| `command.py` | the command `fedsim totals` |
"""
