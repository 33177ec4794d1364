"""Runs that differ in the seed alone are one variant with its seeds."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedsim.comparison.differences import SettingsTable, setting_text, settings_table
from fedsim.comparison.finished.given_run import GivenRun
from fedsim.comparison.results import ComparisonError
from fedsim.comparison.text import common_prefix
from fedsim.runs.private_digest import have_one_key

_MAX_NAME_CHARACTERS = 60
_SEED_ENDING = re.compile(r"[-_.=]*(seed|s)?[-_.=]*\Z")
_SEED_DIRECTORY = re.compile(r"(seed|s)?[-_.=]*\d+\Z")


@dataclass(frozen=True)
class GivenVariant:
    """Runs of one experiment.

    Attributes:
        name: their name in results.
        runs: one for each seed.
        changes: none, for there is no base.
    """

    name: str
    runs: tuple[GivenRun, ...]
    changes: dict[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """The settings of its runs, seed and name apart."""
        return self.runs[0].settings

    @property
    def unit(self) -> str | None:
        """What its ε protects, `example` or `client`; None without privacy."""
        privacy = self.runs[0].experiment.privacy
        return None if privacy is None else privacy.unit


def group_runs(runs: Sequence[GivenRun]) -> tuple[tuple[GivenVariant, ...], list[str]]:
    """Return the variants in the order of their first runs, and a sentence for each repeated run.

    A second run of the same experiment with the same seed is no new seed, so it is left out.

    Raises:
        ComparisonError: two runs have the same settings and seed and other data.
    """
    groups: dict[str, dict[int, GivenRun]] = {}
    repeated: list[str] = []
    for run in runs:
        group = groups.setdefault(json.dumps(run.settings, sort_keys=True), {})
        first = group.setdefault(run.seed, run)
        if first is run:
            continue
        digests = first.inputs.get("data", ""), run.inputs.get("data", "")
        if have_one_key(*digests) and digests[0] != digests[1]:
            raise ComparisonError(
                f"{first.path} and {run.path} have the same settings and seed, but other data: "
                "the data set was changed between them, so they are not of one experiment; "
                "leave one of them out"
            )
        repeated.append(
            f"{run.path} is left out: it has the settings and the seed of {first.path}, and a "
            "repeated run is no new seed."
        )
    variants = [
        GivenVariant("", tuple(group[seed] for seed in sorted(group))) for group in groups.values()
    ]
    names = _names(variants)
    return tuple(replace(one, name=name) for one, name in zip(variants, names, strict=True)), (
        repeated
    )


def _names(variants: Sequence[GivenVariant]) -> list[str]:
    """Return names that tell variants apart: of directories, else of settings that differ."""
    names = [_directory_name(one.runs) for one in variants]
    if all(names) and len(set(names)) == len(names):
        return names
    numbered = {str(number): one.settings for number, one in enumerate(variants)}
    table = settings_table(numbered)
    found = [_settings_name(table, key) or name for key, name in zip(numbered, names, strict=True)]
    return [
        name if found.count(name) == 1 and name else f"{name or 'variant'}-{number}"
        for number, name in enumerate(found, start=1)
    ]


def _directory_name(runs: Sequence[GivenRun]) -> str:
    """Return the common name of run directories without their seeds; "" if there is none."""
    paths = [run.path.resolve() for run in runs]
    if len({path.parent for path in paths}) == 1 and all(
        _SEED_DIRECTORY.fullmatch(path.name) for path in paths
    ):
        return paths[0].parent.name
    if len(paths) == 1:
        return paths[0].name
    return _SEED_ENDING.sub("", common_prefix([path.name for path in paths]))


def _settings_name(table: SettingsTable, name: str) -> str:
    """Return the settings that differ, such as `target_epsilon=8`; "" if they are too long."""
    parts = [
        f"{key.rpartition('.')[2]}={setting_text(value)}"
        for key, value in table.values[name].items()
    ]
    text = ", ".join(parts)
    return text if len(text) <= _MAX_NAME_CHARACTERS else ""
