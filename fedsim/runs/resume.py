"""Changes of an experiment that a resumed run allows, and the command that resumes it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.experiment import Experiment
from fedsim.experiment.errors import shorten
from fedsim.runs.directory import RunDirectoryError

_MISSING = object()
_MAY_CHANGE = ("runtime.", "secure_aggregation.on_abort", "secure_aggregation.protocol.combine_")


def resume_command(source: object, overrides: Mapping[str, Any] | Sequence[str], path: Path) -> str:
    """Return the command that continues a run.

    Args:
        source: the experiment, of which a path is named.
        overrides: as given to the run.
        path: the run directory.
    """
    file = str(source) if isinstance(source, str | Path) else "FILE"
    pairs = overrides.items() if isinstance(overrides, Mapping) else ()
    changes = [f"{key}={value}" for key, value in pairs] or list(overrides)
    return shlex.join(["fedsim", "run", file, *changes, "--out", str(path), "--resume"])


def refuse_changes(before: Experiment, after: Experiment) -> None:
    """Check that a run may resume with a changed experiment.

    `runtime` may change, since it changes no result. `secure_aggregation.on_abort` and
    `protocol.combine_...` may change. `federation.rounds` may grow under a given
    `noise_multiplier` and with `input_perturbation`, whose rounds cost nothing, but not with
    `noise_correlation`, which charges a whole run at its start.

    Args:
        before: the experiment of the run.
        after: the experiment to resume with.

    Raises:
        RunDirectoryError: another key differs; the message names it with both values.
    """
    found = differences(before.model_dump(mode="json"), after.model_dump(mode="json"), "")
    for key, (old, new) in found.items():
        if key.startswith(_MAY_CHANGE):
            continue
        if key == "federation.rounds":
            _check_rounds(after, old, new)
            continue
        raise RunDirectoryError(
            f"{key} was {_one_line(old)} in the run and is {_one_line(new)} now, and cannot "
            "change on resume: set it back, or start a new run in another --out"
        )


def _one_line(value: object) -> str:
    return shorten(" ".join(str(value).split()))


def _check_rounds(after: Experiment, old: int, new: int) -> None:
    if new < old:
        raise RunDirectoryError(
            f"federation.rounds was {old} in the run and is {new} now: rounds can only be added"
        )
    if after.release_kind.later_rounds_are_free:
        return  # the noisy examples are paid for, and rounds cost nothing
    if after.privacy is not None and not after.privacy.gives_noise:
        raise RunDirectoryError(
            f"federation.rounds was {old} in the run and is {new} now, but the noise was "
            f"calibrated to spend the target_epsilon of each client over {old} rounds: more would "
            "exceed it"
        )
    if after.privacy is not None and after.privacy.noise_correlation != "none":
        raise RunDirectoryError(
            f"federation.rounds was {old} in the run and is {new} now, but noise_correlation "
            f"charged each client for {old} rounds before the first one: start a new run in "
            "another --out"
        )


def differences(old: Any, new: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """Return the keys below `path` in which two trees differ, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {path: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        inner = f"{path}.{key}" if path else str(key)
        pair = old.get(key, _MISSING), new.get(key, _MISSING)
        if _MISSING in pair:
            found[inner] = tuple("absent" if v is _MISSING else v for v in pair)  # pyright: ignore[reportArgumentType]
        else:
            found.update(differences(*pair, inner))
    return found
