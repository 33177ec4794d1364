"""Live logging of runs to other people's tools: `runtime.trackers`, one small protocol.

A tracker is told what stands in `rounds.jsonl` and nothing else; that file is always written, and
a tracker that fails is dropped with a warning: it never ends a run. Nothing here changes a result.
"""
