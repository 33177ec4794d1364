"""Record and replay: every value that left a client is computed again from what was charged.

| module | content |
|---|---|
| `channel.py` | the recorded clients train again; the others answer as recorded |
| `replay.py` | the federation is run again in memory, and compared round by round |

A replay imports the plug-ins and reads the data that the experiment names: replay only a run whose
plug-ins you trust.
"""

from fedsim.tools.replay.replay import Replay as Replay
from fedsim.tools.replay.replay import ReplayImpossibleError as ReplayImpossibleError
from fedsim.tools.replay.replay import replay_run as replay_run
