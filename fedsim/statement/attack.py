"""The bound on attacks for all clients of a run, from the privacy profiles of their ledgers.

It is, at each false-positive rate, the largest of the clients' bounds. It may belong to another
client at each rate, since clients with the same (ε, δ) may have different profiles.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, ValidationError

from fedsim.accountant import PrivacyLedger
from fedsim.accountant.accountants import AccountantChoice
from fedsim.accountant.attack_bound import Profile, ledger_profile
from fedsim.accountant.events import Adjacency

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)  # the rates in tables and sentences

# From 1e-4 to 1, ten to a decade, rounded as they are printed, so that each printed bound holds at
# the printed rate.
_PLOTTED_RATES = [float(f"{10 ** (k / 10 - 4):.2g}") for k in range(41)]
_GRID = tuple(sorted({*FALSE_POSITIVE_RATES, *_PLOTTED_RATES}))
_ROUNDING = 1e-9
_Rate = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]


def profile_of(
    row: Mapping[str, Any], accountant: AccountantChoice, adjacency: Adjacency
) -> Profile | None:
    """Return the privacy profile of a client, from `client`, `ledger` and `delta` of its row.

    The result is None if the accountant cannot read the ledger, or if its ε is infinite.
    """
    try:
        ledger = PrivacyLedger.from_list(row["ledger"])
        profile = ledger_profile(ledger, row["delta"], accountant, adjacency)
    except ValueError:
        return None
    return None if profile is None else replace(profile, client=row["client"])


@dataclass(frozen=True)
class AttackBound:
    """Upper bound on the true-positive rate of any membership-inference attack on any client."""

    false_alarms: tuple[_Rate, ...]  # false-positive rates, ascending
    detection: tuple[_Rate, ...]  # bound on the true-positive rate at each of them

    @classmethod
    def over(cls, profiles: Iterable[Profile]) -> Self:
        """Return the bound that covers several profiles: at each rate, the largest of theirs."""
        curves = [profile.true_positive_bounds(_GRID) for profile in profiles]
        return cls(_GRID, tuple(max(bounds) for bounds in zip(_GRID, *curves, strict=True)))

    @classmethod
    def from_json(cls, content: object) -> Self | None:
        """Return the bound in `attack` of `privacy.json`; None if invalid or without all rates."""
        try:
            bound = TypeAdapter(cls).validate_python(content)
        except ValidationError:
            return None
        rates = bound.false_alarms
        is_whole = len(rates) == len(bound.detection) and set(FALSE_POSITIVE_RATES) <= set(rates)
        return bound if is_whole else None

    def covers(self, profile: Profile) -> bool:
        """Whether this bound is at least the bound of a profile, at every false-positive rate."""
        least = profile.true_positive_bounds(self.false_alarms)
        pairs = zip(self.detection, least, strict=True)
        return all(bound >= needed * (1 - _ROUNDING) for bound, needed in pairs)

    @property
    def table(self) -> tuple[tuple[float, float], ...]:
        """Pairs (false-positive rate, bound on true-positive rate) at `FALSE_POSITIVE_RATES`."""
        of = dict(zip(self.false_alarms, self.detection, strict=True))
        return tuple((rate, of[rate]) for rate in FALSE_POSITIVE_RATES)


def attack_bound(
    rows: Sequence[Mapping[str, Any]], *, accountant: AccountantChoice, adjacency: Adjacency
) -> AttackBound | None:
    """Return the bound that holds for every attack on any client, by rows of `privacy.json`.

    The result is None if an ε is infinite, a ledger cannot be read, or no client was charged. A
    client is skipped if another has the same δ and event, with at least as many releases and at
    most as much noise: a noisier release is a function of a less noisy one.
    """
    profiles = [profile_of(row, accountant, adjacency) for row in _undominated(rows)]
    known = [profile for profile in profiles if profile is not None]
    return AttackBound.over(known) if known and len(known) == len(profiles) else None


def _undominated(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the charged rows whose releases are not functions of another row's releases."""
    groups: dict[str, list[tuple[float, int, Mapping[str, Any]]]] = {}
    for row in rows:
        released, noise, count = row["ledger"], 0.0, 0
        if not released:
            continue
        if len(released) == 1 and isinstance(released[0]["count"], int):
            count = released[0]["count"]
            released, noise = _without_noise(released[0]["event"])
        key = json.dumps([released, row["delta"]], sort_keys=True)
        groups.setdefault(key, []).append((noise, count, row))
    for group in groups.values():
        most = -1
        for _, count, row in sorted(group, key=lambda entry: (entry[0], -entry[1])):
            if count > most:  # more releases than any row with at most this noise
                yield row
                most = count


def _without_noise(event: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Return an event without its noise multiplier, and that multiplier; 0 if it has none."""
    noise, inner = event.get("noise_multiplier"), event.get("event")
    if event.get("type") == "Gaussian" and isinstance(noise, float) and math.isfinite(noise):
        return {**event, "noise_multiplier": None}, noise
    if isinstance(inner, Mapping):
        without, noise = _without_noise(inner)
        return {**event, "event": without}, noise
    return event, 0.0
