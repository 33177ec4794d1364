"""The participants of each round: public schedules, and a secret draw.

| module | content |
|---|---|
| `settings.py` | `federation.participation`, a class for each scheme; ranges as `1-20, 41-60` |
| `participation.py` | what plans, charges, blocks and checks ask of a schedule |
| `schedules.py` | uniform draws, independent draws, groups that take turns, availability traces |
| `buffered.py` | asynchronous rounds on a simulated clock (FedBuff) |
"""
