"""Checks of a finished run: its files are compared with the manifest and with each other.

| module | compares |
|---|---|
| `verify.py` | the files and `manifest.json`; figures and words computed from other files |
| `spend.py` | `ledger.jsonl` and `privacy.json`: chains, sums, every ε recomputed |
| `plans.py` | ledger and `privacy.json` with `experiment.yaml`: q, z, δ, steps |
| `plans.py` | `rounds.jsonl` with the schedule, the ledger and the checkpoint |

q is the sampling rate and z the noise multiplier. No file outside of the run directory is imported
or read, since a plug-in or a table may have any content.
"""

from fedsim.runs.verification.spend import Checked as Checked
from fedsim.runs.verification.verify import Verification as Verification
from fedsim.runs.verification.verify import verify_run as verify_run
