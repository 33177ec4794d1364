"""Participants of each round, chosen by a public schedule or a secret draw.

| module | content |
|---|---|
| `settings.py` | settings of each scheme, and the reading of ranges such as `1-20, 41-60` |
| `participation.py` | clients of each round, for the server, the privacy plan and the charges |
| `schedules.py` | uniform draws, independent draws, turns, availability traces |
| `buffered.py` | asynchronous rounds on a simulated clock (FedBuff) |
"""
