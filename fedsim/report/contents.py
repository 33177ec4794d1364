"""The content of the report: the files of a run directory, read once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsim.core.metrics import metric_key
from fedsim.core.text_formats import FormatError, parse_plain_yaml
from fedsim.report.scores import Scores, read_scores
from fedsim.runs.directory import RunDirectory
from fedsim.runs.recorded_figures import ANSWERS, CLIENT_DATA, PERSONALIZATION
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
        client_data: `client_data.json`; None in a run without figures of private data.
        scores: `scores.json`; None in a failed run.
        answers: `answers.json`; None for another task than `pate`.
    """

    summary: dict[str, Any]
    privacy: dict[str, Any]
    rounds: list[RoundRow]
    environment: dict[str, Any]
    experiment: str
    personal: dict[str, Any] | None = None
    client_data: dict[str, Any] | None = None
    scores: Scores | None = None
    answers: dict[str, Any] | None = None

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
        chosen = self._setting("evaluation", "metrics")
        return self._metrics("test_", chosen if isinstance(chosen, list) else ())

    @property
    def client_metrics(self) -> dict[str, float | None]:
        """The final metrics on clients' held-out examples; empty without evaluation by clients."""
        return self._metrics("clients_")

    def _metrics(self, where: str, chosen: Sequence[Any] = ()) -> dict[str, float | None]:
        """Return the metrics in the order of the file, or else the main one of the task first."""
        found = {name: value for name, value in self.summary.items() if name.startswith(where)}
        names = [metric_key(str(name)) for name in chosen] or ["accuracy", "r2", "mse"]
        order = [f"{where}{name}" for name in names]
        first = [name for name in order if name in found]
        rest = [name for name in found if name not in order]
        return {name: found[name] for name in first + rest}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in `experiment.yaml`; empty where it is unreadable, as after an edit."""
        try:
            settings = parse_plain_yaml(self.experiment)
        except FormatError:
            return {}
        return settings if isinstance(settings, dict) else {}

    @property
    def planned_rounds(self) -> int | None:
        """Number of rounds in the experiment; None where its file is unreadable."""
        rounds = self._setting("federation", "rounds")
        return rounds if isinstance(rounds, int) else None

    def _setting(self, section: str, key: str) -> object:
        """Return a setting of the experiment; None where its file is unreadable."""
        found = self.settings.get(section)
        return found.get(key) if isinstance(found, dict) else None


def read_contents(directory: RunDirectory) -> RunContents:
    """Return the files that the report needs.

    Raises:
        RunDirectoryError: the run has no result files.
    """
    has_scores = (directory.path / PERSONALIZATION).exists()
    has_data = (directory.path / CLIENT_DATA).exists()
    return RunContents(
        summary=directory.read_json("summary.json"),
        privacy=directory.read_json("privacy.json"),
        rounds=directory.read_rounds(),
        environment=directory.read_json("environment.json"),
        experiment=(directory.path / "experiment.yaml").read_text(encoding="utf-8"),
        personal=directory.read_json(PERSONALIZATION) if has_scores else None,
        client_data=directory.read_json(CLIENT_DATA) if has_data else None,
        scores=read_scores(directory),
        answers=directory.read_json(ANSWERS) if (directory.path / ANSWERS).exists() else None,
    )
