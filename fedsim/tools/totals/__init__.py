"""Totals of clients over several runs and ledgers, also those of other tools.

| module | what it does |
|---|---|
| `sources.py` | reads run directories, ledgers and entries of the registry |
| `foreign.py` | events in the notation of other tools and of the public registry |
| `totals.py` | composes the ledgers of each client |
| `registry_entry.py` | a draft of an entry of the public registry of deployments, from runs |
| `terminal.py` | prints the totals |
"""
