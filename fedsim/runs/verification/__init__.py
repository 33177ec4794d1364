"""Check a run directory: compare its files with the manifest and with each other.

| module | compares |
|---|---|
| `verify.py` | the files and `manifest.json`; figures and words computed from other files |
| `spend.py` | `ledger.jsonl` and `privacy.json`: chains, sums, every ε recomputed |
| `plans.py` | ledger and `privacy.json` with `experiment.yaml`: q, z, δ, steps |
| `plans.py` | `rounds.jsonl` with the schedule, the ledger and the checkpoint |

Nothing that the run directory names is imported or read: a plug-in or a table outside of it may be
anything.
"""

from fedsim.runs.verification.spend import Checked as Checked
from fedsim.runs.verification.verify import Verification as Verification
from fedsim.runs.verification.verify import verify_run as verify_run
