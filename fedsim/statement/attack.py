"""Bound on every attack on any client: the pointwise maximum over the clients' profiles.

Two curves δ(ε) that meet at one pair (ε, δ) may cross elsewhere. So with budgets that are
calibrated to one ε, no single client is the worst case at every false-alarm rate.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.events import Adjacency
from fedsim.statement.profile import Profile, profile_of

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)  # in tables and sentences

# From 1e-4 to 1, ten to a decade, as they are printed: the bound beside one is the bound at it.
_PLOTTED_RATES = [float(f"{10 ** (k / 10 - 4):.2g}") for k in range(41)]
_GRID = tuple(sorted({*FALSE_POSITIVE_RATES, *_PLOTTED_RATES}))
_ROUNDING = 1e-9


@dataclass(frozen=True)
class AttackBound:
    """Upper bound on the true-positive rate of any attack on any client.

    Attributes:
        false_alarms: false-positive rates, ascending.
        detection: bound on the true-positive rate at each.
    """

    false_alarms: tuple[float, ...]
    detection: tuple[float, ...]

    @classmethod
    def over(cls, profiles: Iterable[Profile]) -> Self:
        """Return the pointwise maximum of the bounds of profiles."""
        each = [[profile.true_positive_bound(rate) for rate in _GRID] for profile in profiles]
        return cls(_GRID, tuple(max(bounds) for bounds in zip(_GRID, *each, strict=True)))

    @classmethod
    def from_json(cls, content: object) -> Self | None:
        """Return the bound in `privacy.json`; None if it is none at the rates of the tables."""
        if not isinstance(content, dict):
            return None
        lists = content.get("false_alarms"), content.get("detection")
        if not all(isinstance(part, list) and _are_rates(part) for part in lists):
            return None
        rates, bounds = tuple(lists[0] or ()), tuple(lists[1] or ())
        if len(rates) != len(bounds) or not set(FALSE_POSITIVE_RATES) <= set(rates):
            return None
        return cls(rates, bounds)

    def to_json(self) -> dict[str, list[float]]:
        """Return the content of `attack` in `privacy.json`."""
        return {"false_alarms": list(self.false_alarms), "detection": list(self.detection)}

    def covers(self, profile: Profile) -> bool:
        """Whether the bound is nowhere below that of a profile."""
        return all(
            bound >= profile.true_positive_bound(rate) * (1 - _ROUNDING)
            for rate, bound in zip(self.false_alarms, self.detection, strict=True)
        )

    @property
    def table(self) -> tuple[tuple[float, float], ...]:
        """(false-positive rate, bound) at `FALSE_POSITIVE_RATES`."""
        of = dict(zip(self.false_alarms, self.detection, strict=True))
        return tuple((rate, of[rate]) for rate in FALSE_POSITIVE_RATES)


def attack_bound(
    rows: Sequence[Mapping[str, Any]],
    *,
    accountant: AccountantChoice,
    adjacency: Adjacency,
) -> AttackBound | None:
    """Return the bound on every attack on any client; None where a ledger proves nothing.

    Of ledgers of one event, those are read that no other one dominates: further releases make no
    attack weaker, and less noise makes none either, since more noise is a function of less.

    Args:
        rows: `clients` of `privacy.json`.
        accountant: the method that computes δ(ε).
        adjacency: the adjacency of the ledgers' events.
    """
    profiles = []
    for row in _undominated(rows):
        try:
            found = profile_of(
                row["client"],
                row["ledger"],
                delta=row["delta"],
                accountant=accountant,
                adjacency=adjacency,
            )
        except ValueError:  # this accountant cannot read the ledger
            return None
        if found is None:
            return None
        profiles.append(found)
    return AttackBound.over(profiles) if profiles else None


def _undominated(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows that have charges, without those whose releases are functions of another's."""
    groups: dict[str, list[tuple[float, int, Mapping[str, Any]]]] = {}
    for row in rows:
        ledger, noise, count = row["ledger"], 0.0, 0
        if not ledger:
            continue
        released: object = ledger
        if len(ledger) == 1 and isinstance(ledger[0]["count"], int):
            released, noise = _without_noise(ledger[0]["event"])
            count = ledger[0]["count"]
        key = json.dumps([released, row["delta"]], sort_keys=True)
        groups.setdefault(key, []).append((noise, count, row))
    for group in groups.values():
        most = -1
        for _, count, row in sorted(group, key=lambda one: (one[0], -one[1])):
            if count > most:  # more releases than all with at most this noise
                yield row
                most = count


def _without_noise(event: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Return an event without the noise multiplier of its Gaussian, and that; 0 if there is none.

    Args:
        event: as JSON values.
    """
    noise, inner = event.get("noise_multiplier"), event.get("event")
    if event.get("type") == "Gaussian" and isinstance(noise, float) and math.isfinite(noise):
        return {**event, "noise_multiplier": None}, noise
    if isinstance(inner, Mapping):
        without, noise = _without_noise(inner)
        return {**event, "event": without}, noise
    return event, 0.0


def _are_rates(values: Sequence[object]) -> bool:
    return all(
        isinstance(value, float | int) and not isinstance(value, bool) and 0.0 <= value <= 1.0
        for value in values
    )
