"""Participants of each round, chosen by a public schedule or a secret draw.

| module | content |
|---|---|
| `settings.py` | `federation.participation`, a class for each scheme; ranges as `1-20, 41-60` |
| `participation.py` | who takes part when, as the privacy plan and the charges use it |
| `schedules.py` | uniform draws, independent draws, groups that take turns, availability traces |
| `buffered.py` | asynchronous rounds on a simulated clock (FedBuff) |
"""
