"""Which parts given runs share, and why scores of other test sets are not compared."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from fedsim.comparison.differences import setting_text
from fedsim.comparison.finished.given_run import GivenRun
from fedsim.comparison.finished.variants import GivenVariant
from fedsim.federation.schedule import participation_of

_TEST_SETTINGS = ("data.dataset", "data.test_fraction")


def shared_digests(run: GivenRun) -> dict[str, str]:
    """Return digests of the parts that paired runs share, as recorded when the run began."""
    schedule = participation_of(
        run.experiment, num_clients=len(run.directory.read_json("privacy.json")["clients"])
    )
    state = hashlib.sha256()
    for number in range(1, run.experiment.federation.rounds + 1):
        state.update(np.array([-1, *schedule.on_record(number)], dtype=np.int64).tobytes())
    return {
        "data": run.inputs["data"],
        "initial_model": run.inputs["model"],
        "participants": state.hexdigest(),
    }


def test_set_problems(variants: Sequence[GivenVariant]) -> Iterator[str]:
    """Yield why the scores of a variant and of the first one cannot be compared.

    Runs with one seed must have the same targets in the test set. Where no seed is in both, the
    settings of the test set must agree.
    """
    first, *others = variants
    for other in others:
        problem = _problem(first, other)
        if problem is not None:
            yield (
                f"{first.name} and {other.name} {problem}, so their scores cannot be compared; "
                "compare runs with one test set"
            )


def _problem(first: GivenVariant, other: GivenVariant) -> str | None:
    pairs = [(a, b) for a in first.runs for b in other.runs if a.seed == b.seed]
    for a, b in pairs:
        if a.inputs["test"] != b.inputs["test"]:
            return f"have different test sets ({a.path} and {b.path}){_differing(first, other)}"
    if pairs:
        return None
    differing = _differing(first, other)
    return f"have different test sets{differing}" if differing else None


def _differing(first: GivenVariant, other: GivenVariant) -> str:
    found = [
        f"{key}: {setting_text(first.settings.get(key))} and "
        f"{setting_text(other.settings.get(key))}"
        for key in dict.fromkeys([*first.settings, *other.settings])
        if key.startswith(_TEST_SETTINGS) and first.settings.get(key) != other.settings.get(key)
    ]
    return f": {'; '.join(found)}" if found else ""
