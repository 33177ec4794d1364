"""A forger who changes records of a run and computes everything that follows from them anew."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedsim.accountant.ledger.journal import Charge
from fedsim.accountant.ledger.privacy_ledger import PrivacyLedger
from fedsim.core.durable import GENESIS
from fedsim.core.errors import FedsimError
from fedsim.runs.directory import RunDirectory
from fedsim.runs.files import first_lines
from fedsim.runs.manifest import write_manifest
from fedsim.runs.records import RunCheckpoint
from fedsim.runs.verification import verify_run
from fedsim.statement import read_facts, to_json
from fedsim.statement.privacy_file import ledger_digest


def refusal(run: Path, **options: Any) -> str:
    """Return what `verify` says against a run; empty for a sound one."""
    try:
        return "\n".join(verify_run(RunDirectory.open(run), **options).problems)
    except FedsimError as error:
        return str(error)


class Forger:
    """Changes the records of a run and computes everything that follows from them anew.

    Attributes:
        charges: the lines of `ledger.jsonl`.
        rounds: the lines of `rounds.jsonl`.
        privacy: `privacy.json`.
        summary: `summary.json`.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.directory = run, RunDirectory(run)
        self.charges = [json.loads(line) for line in (run / "ledger.jsonl").open()]
        self.rounds: list[dict[str, Any]] = [
            json.loads(line) for line in (run / "rounds.jsonl").open()
        ]
        self.privacy: dict[str, Any] = self.directory.read_json("privacy.json")
        self.summary = self.directory.read_json("summary.json")

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text in a file."""
        text = (self.run / name).read_text()
        assert text.count(old) == 1, (name, old)
        (self.run / name).write_text(text.replace(old, new))

    def replace_in_ledger(self, old: str, new: str) -> None:
        """Replace a text in every record."""
        assert old in json.dumps(self.charges)
        self.charges = json.loads(json.dumps(self.charges).replace(old, new))

    def write(self) -> str:
        """Write the run with its chains, ε, words, tables, digests and manifest; verify it."""
        heads = self._write_ledger()
        self._write_privacy(heads)
        (self.run / "rounds.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in self.rounds)
        )
        (self.run / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
        self._write_checkpoint(heads)
        write_manifest(self.directory)
        return refusal(self.run)

    def _write_checkpoint(self, heads: dict[int, str]) -> None:
        found = self.directory.read_checkpoint()
        assert found is not None
        lines = first_lines(self.run / "rounds.jsonl", found.state.round_number)
        digest = hashlib.sha256(lines).hexdigest()
        self.directory.write_checkpoint(RunCheckpoint(found.state, heads, digest))

    def _write_ledger(self) -> dict[int, str]:
        heads: dict[int, str] = {}
        lines = []
        for one in self.charges:
            charge = Charge(
                client=one["client"],
                round_number=one["round"],
                request=one["request"],
                steps=one["steps"],
                ledger=PrivacyLedger.from_list(one["ledger"]),
                previous=heads.get(one["client"], GENESIS),
                against_server=_ledger_of([one], "against_server"),
            )
            heads[charge.client] = charge.hash
            lines.append(charge.to_line())
        (self.run / "ledger.jsonl").write_text("".join(lines))
        return heads

    def _write_privacy(self, heads: dict[int, str]) -> None:
        rows = self.privacy.pop("clients")
        for row in rows:
            own = [one for one in self.charges if one["client"] == row["client"]]
            ledger = _ledger_of(own, "ledger") or PrivacyLedger()
            second = _ledger_of(own, "against_server")
            if "ledger_against_server" in row:
                row["ledger_against_server"] = None if second is None else second.to_list()
                row["epsilon_against_server"] = second and second.epsilon_with_slack(row["delta"])
            row |= {
                "ledger": ledger.to_list(),
                "ledger_head": heads.get(row["client"], GENESIS),
                "rounds": len(own),
                "steps": sum(one["steps"] for one in own),
                "epsilon": ledger.epsilon_with_slack(row["delta"], "pld", "zero_out"),
                "epsilon_rdp": ledger.epsilon_with_slack(row["delta"], "rdp", "zero_out"),
            }
        epsilons = sorted(row["epsilon"] for row in rows)
        self.privacy |= {"system_epsilon": epsilons[-1], "ledger_digest": ledger_digest(rows)}
        self.privacy |= to_json(read_facts({**self.privacy, "clients": rows}))
        self.privacy["clients"] = rows
        self.directory.write_json("privacy.json", self.privacy)
        self.directory.write_clients(rows)
        middle = epsilons[len(epsilons) // 2]
        if len(epsilons) % 2 == 0:
            middle = (middle + epsilons[len(epsilons) // 2 - 1]) / 2
        self.summary["epsilon"] = {"max": epsilons[-1], "median": middle, "min": epsilons[0]}
        self.summary["delta"] = max(row["delta"] for row in rows)
        for row in self.rounds:
            row["epsilon_max"] = min(row["epsilon_max"], epsilons[-1])


def _ledger_of(charges: list[dict[str, Any]], key: str) -> PrivacyLedger | None:
    """Return the ledger of all charges under a key; None where they have none."""
    if not any(key in one for one in charges):
        return None
    ledger = PrivacyLedger()
    for one in charges:
        ledger.merge(PrivacyLedger.from_list(one.get(key, [])))
    return ledger
