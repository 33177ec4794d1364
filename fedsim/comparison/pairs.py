"""Whether runs with one seed share what they should: data, initial model, participants."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

PARTS = {
    "data": "data (partitions, test set)",
    "initial_model": "initial model",
    "participants": "participants of every round",
}


def pairing_digests(federation: "Federation") -> dict[str, str]:
    """Return a SHA-256 for each of `PARTS` of a federation that is about to run."""
    data = federation.data
    examples = chain(data.clients, [data.test], data.held_out or ())
    state = federation.model.state_dict()
    schedule = federation.participation
    rounds = range(1, federation.experiment.federation.rounds + 1)
    return {
        "data": _digest(array for one in examples for array in (one.features, one.targets)),
        "initial_model": _digest(value.cpu().numpy() for value in state.values()),
        "participants": _digest(np.array(schedule.in_round(number)) for number in rounds),
    }


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Pairing:
    """What every variant shares with the baseline, seed by seed.

    Attributes:
        differences: for each variant that does not share everything, the names of the parts.
        checked: number of pairs of runs that were compared.
    """

    differences: Mapping[str, tuple[str, ...]]
    checked: int

    @property
    def paired(self) -> bool:
        """Whether all pairs share everything, and there are pairs."""
        return self.checked > 0 and not self.differences

    @property
    def statement(self) -> str:
        """What was found, in words."""
        if not self.checked:
            return "No seed finished both in the baseline and in another variant."
        if self.paired:
            return (
                f"Checked in all {self.checked} pairs of runs: with the same seed, every variant "
                f"shares {_listed(list(PARTS.values()))} with the baseline."
            )
        found = "; ".join(
            f"{name} differs in its {_listed([PARTS[part] for part in parts])}"
            for name, parts in self.differences.items()
        )
        return (
            f"Not everything is shared with the baseline: {found}. What a variant changes itself "
            "cannot be shared; the difference to the baseline varies more for it."
        )

    def to_json(self) -> dict[str, object]:
        """Return the pairing as in `comparison.json`."""
        return {
            "paired": self.paired,
            "checked": self.checked,
            "differences": {name: list(parts) for name, parts in self.differences.items()},
            "statement": self.statement,
        }


def check_pairing(digests: Mapping[str, Mapping[int, Mapping[str, str]]], baseline: str) -> Pairing:
    """Compare every variant's digests with the baseline's of the same seed.

    Args:
        digests: for each variant and seed that ran, the digests of `pairing_digests`.
        baseline: name of the variant to compare with.
    """
    reference = digests.get(baseline, {})
    differences: dict[str, tuple[str, ...]] = {}
    checked = 0
    for name, seeds in digests.items():
        if name == baseline:
            continue
        shared = [seed for seed in seeds if seed in reference]
        checked += len(shared)
        parts = tuple(
            part
            for part in PARTS
            if any(seeds[seed].get(part) != reference[seed].get(part) for seed in shared)
        )
        if parts:
            differences[name] = parts
    return Pairing(differences, checked)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
