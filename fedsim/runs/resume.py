"""What may change between a run and its continuation."""

from typing import Any

from fedsim.experiment import Experiment
from fedsim.runs.directory import RunDirectoryError

_MISSING = object()
_MAY_CHANGE = ("runtime.", "secure_aggregation.on_abort", "secure_aggregation.combine_")


def refuse_changes(before: Experiment, after: Experiment) -> None:
    """Check that a run may be continued as another experiment.

    `runtime` may change, since it changes no result, so may what is done where a secure sum cannot
    be opened, and `federation.rounds` may grow where the noise does not depend on it.

    Raises:
        RunDirectoryError: another key differs; it is named with both values.
    """
    found = differences(before.model_dump(mode="json"), after.model_dump(mode="json"), "")
    for key, (old, new) in found.items():
        if key.startswith(_MAY_CHANGE):
            continue
        if key == "federation.rounds":
            _check_rounds(after, old, new)
            continue
        raise RunDirectoryError(
            f"{key} was {old} in the run and is {new} now: a run is continued as it was; "
            "start a new one in another --out"
        )


def _check_rounds(after: Experiment, old: int, new: int) -> None:
    if new < old:
        raise RunDirectoryError(
            f"federation.rounds was {old} in the run and is {new} now: rounds can only be added"
        )
    if after.privacy is not None and after.privacy.noise_multiplier is None:
        raise RunDirectoryError(
            f"federation.rounds was {old} in the run and is {new} now, but the noise was "
            f"calibrated to spend the target_epsilon of each client over {old} rounds: more would "
            "exceed it"
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
