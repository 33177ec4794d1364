"""Noise that is correlated over the rounds of a run: strategies, their cost, and their numbers.

| module | content |
|---|---|
| `strategies.py` | interface of a strategy; Toeplitz matrices, and the binary tree |
| `blt.py` | buffered linear Toeplitz strategies, and their optimised parameters |
| `rows.py` | the noise itself: integers, round after round |
| `settings.py` | kinds of correlation, and the rounds that one client may be in |
| `run.py` | one run's strategy and participation, as a mechanism charges them |

Theorems and proofs: docs/explain/proofs.md.
"""
