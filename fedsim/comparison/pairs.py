"""Check that runs with the same seed share data, initial model and participants."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from fedsim.runs.private_digest import private_digest

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

SHARED_PARTS = {
    "data": "data (partitions, features, test set)",
    "initial_model": "initial model",
    "participants": "participants of every round",
}


def pair_digests(federation: "Federation") -> dict[str, str]:
    """Return a digest of each of `SHARED_PARTS`, that of data keyed, before the run."""
    data = federation.data
    examples = chain(data.clients, [data.test], data.held_out or ())
    state = federation.model.module.state_dict()
    schedule = federation.plan.participation
    rounds = range(1, federation.experiment.federation.rounds + 1)
    return {
        "data": private_digest(x for one in examples for x in (one.features, one.targets)),
        "initial_model": _digest(value.cpu().numpy() for value in state.values()),
        "participants": _digest(np.array(schedule.on_record(number)) for number in rounds),
    }


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class PairCheck:
    """The parts that variants share with the baseline, over all seeds.

    Attributes:
        differences: the differing parts, for each variant that has any.
        checked: number of compared pairs of runs.
    """

    differences: Mapping[str, tuple[str, ...]]
    checked: int

    @property
    def is_paired(self) -> bool:
        """Whether there are pairs and all of them share every part."""
        return self.checked > 0 and not self.differences

    @property
    def statement(self) -> str:
        """The result in words."""
        if not self.checked:
            return "No seed finished both in the baseline and in another variant."
        if self.is_paired:
            pairs = "the pair" if self.checked == 1 else f"all {self.checked} pairs"
            return (
                f"Checked in {pairs} of runs: with the same seed, every variant "
                f"shares {_listed(list(SHARED_PARTS.values()))} with the baseline."
            )
        found = "; ".join(
            f"{name} differs in its {_names(parts)}" for name, parts in self.differences.items()
        )
        return (
            f"Not everything is shared with the baseline: {found}. A part that a variant changes "
            "cannot be shared, and its difference to the baseline varies more between seeds."
        )

    def to_json(self) -> dict[str, object]:
        """Return `pairing` of `comparison.json`."""
        return {
            "paired": self.is_paired,
            "checked": self.checked,
            "differences": {name: list(parts) for name, parts in self.differences.items()},
            "statement": self.statement,
        }


def check_pairs(
    digests: Mapping[str, Mapping[int, Mapping[str, str]]], pairs: Iterable[tuple[str, str]]
) -> PairCheck:
    """Compare every variant's digests with those of its baseline for the same seed.

    Args:
        digests: `{variant: {seed: pair_digests(...)}}` of all finished runs.
        pairs: (variant, its baseline).
    """
    differences: dict[str, tuple[str, ...]] = {}
    checked = 0
    for name, baseline in pairs:
        seeds, reference = digests.get(name, {}), digests.get(baseline, {})
        shared = [seed for seed in seeds if seed in reference]
        checked += len(shared)
        parts = tuple(
            part
            for part in SHARED_PARTS
            if any(seeds[seed][part] != reference[seed][part] for seed in shared)
        )
        if parts:
            differences[name] = parts
    return PairCheck(differences, checked)


def _names(parts: Sequence[str]) -> str:
    return _listed([SHARED_PARTS[part] for part in parts])


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
