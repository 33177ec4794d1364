"""The content of the report: the files of a run directory, read once."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from fedsim.runs.directory import RunDirectory
from fedsim.runs.personal_scores import FILE as PERSONALIZATION
from fedsim.server.round_report import RoundRow
from fedsim.statement import Facts, RunFacts, read_facts


@dataclass(frozen=True)
class RunContents:
    """The files of a finished run.

    Attributes:
        summary: `summary.json`.
        privacy: `privacy.json`.
        rounds: `rounds.jsonl`, one mapping for each finished round.
        environment: `environment.json`.
        experiment: the text of `experiment.yaml`.
        personal: `personalization.json`; None in a run without scores of personal models.
    """

    summary: dict[str, Any]
    privacy: dict[str, Any]
    rounds: list[RoundRow]
    environment: dict[str, Any]
    experiment: str
    personal: dict[str, Any] | None = None

    @property
    def is_private(self) -> bool:
        """Whether the experiment has differential privacy; the ε may still be infinite."""
        return self.privacy["accountant"] is not None

    @property
    def clients(self) -> list[dict[str, Any]]:
        """The spend of every client, by client number."""
        return self.privacy["clients"]

    @cached_property
    def facts(self) -> Facts:
        """The facts behind the privacy statement of the run."""
        run = RunFacts(
            status=self.summary["status"],
            rounds=self.summary["rounds"],
            planned_rounds=self.planned_rounds,
            lost_updates=sum(len(row["failed"]) for row in self.rounds),
        )
        return read_facts(self.privacy, run=run)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The final metrics on the test set, the main one first."""
        return self._metrics("test_")

    @property
    def client_metrics(self) -> dict[str, float | None]:
        """The final metrics on clients' held-out examples; empty without evaluation by clients."""
        return self._metrics("clients_")

    def _metrics(self, where: str) -> dict[str, float | None]:
        found = {name: value for name, value in self.summary.items() if name.startswith(where)}
        order = [f"{where}{name}" for name in ("accuracy", "r2", "mse")]
        first = [name for name in order if name in found]
        rest = [name for name in found if name not in order]
        return {name: found[name] for name in first + rest}

    @property
    def planned_rounds(self) -> int | None:
        """Number of rounds in the experiment; None where its file is unreadable."""
        try:
            settings = yaml.safe_load(self.experiment)
        except yaml.YAMLError:  # edited by hand; the report does not need this number
            return None
        federation = settings.get("federation") if isinstance(settings, dict) else None
        rounds = federation.get("rounds") if isinstance(federation, dict) else None
        return rounds if isinstance(rounds, int) else None


def read_contents(directory: RunDirectory) -> RunContents:
    """Return the files that the report needs.

    Raises:
        RunDirectoryError: the run has no result files.
    """
    has_scores = (directory.path / PERSONALIZATION).exists()
    return RunContents(
        summary=directory.read_json("summary.json"),
        privacy=directory.read_json("privacy.json"),
        rounds=directory.read_rounds(),
        environment=directory.read_json("environment.json"),
        experiment=(directory.path / "experiment.yaml").read_text(encoding="utf-8"),
        personal=directory.read_json(PERSONALIZATION) if has_scores else None,
    )
