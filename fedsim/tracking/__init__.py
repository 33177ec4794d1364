"""Live logging of runs to external tools (`runtime.trackers`), through the protocol `Tracker`.

A tracker receives the experiment's settings and the numbers of `rounds.jsonl`, nothing else. A
tracker that fails is removed with a warning; it never ends a run. Trackers change no result.
"""
