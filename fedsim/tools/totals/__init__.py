"""Privacy totals of clients: ε over several runs and ledgers, also ledgers of other tools.

| module | what it does |
|---|---|
| `sources.py` | reads run directories and ledgers, also of other tools and the registry |
| `training.py` | reads training files: what code of others does, and what its authors claim |
| `assignment.py` | finds which clients of several runs are the same |
| `totals.py` | composes the ledgers of each client |
| `registry_entry.py` | drafts an entry of the public registry of deployments, from runs |
| `command.py`, `terminal.py` | the command `fedsim totals`, and how it prints the totals |
"""
