"""The privacy ledger: a list of all releases in order, from which epsilon can be recomputed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self, cast

from fedsim.accountant import checks
from fedsim.accountant.accountants import Accountant, AccountantChoice, make_accountant
from fedsim.accountant.events import Adjacency, Event, append_event, event_from_dict, to_dict
from fedsim.accountant.sampler_slack import epsilon_with_slack


class PrivacyLedger:
    """An append-only list of pairs (event, count); consecutive equal events share a pair.

    A ledger records releases and does no accounting, so it accepts every event, also events that a
    given accountant does not support. Nothing can be removed from it.

    Guarantee: the epsilon of a ledger equals that of an accountant that composed the same events,
    whatever the order in which they were recorded or merged.

    Example:
        >>> from fedsim.accountant.events import Gaussian
        >>> ledger = PrivacyLedger().record(Gaussian(2.0), count=3)
        >>> ledger.to_list()
        [{'event': {'type': 'Gaussian', 'noise_multiplier': 2.0}, 'count': 3}]
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Event, int]] = []

    @classmethod
    def of(cls, charges: Iterable[tuple[Event, int]]) -> Self:
        """Return the ledger of some releases, as pairs (event, count) in their order."""
        ledger = cls()
        for event, count in charges:
            ledger.record(event, count)
        return ledger

    @property
    def entries(self) -> tuple[tuple[Event, int], ...]:
        """Recorded pairs (event, count), oldest first; every count is at least 1."""
        return tuple(self._runs)

    def record(self, event: Event, count: int = 1) -> Self:
        """Append `count` releases of `event` and return this ledger.

        Args:
            event: the release to record.
            count: number of releases, a whole number >= 0.

        Raises:
            ValueError: `event` is not an event, or `count` is negative or not whole.
        """
        if not isinstance(event, Event):
            raise ValueError(f"event must be a privacy event such as Gaussian(1.0), got {event!r}")
        append_event(self._runs, event, checks.whole_number("count", count))
        return self

    def merge(self, other: "PrivacyLedger") -> Self:
        """Append all entries of the ledger `other` to this ledger and return this ledger."""
        for event, count in other.entries:
            append_event(self._runs, event, count)
        return self

    def starts_with(self, other: "PrivacyLedger") -> bool:
        """Whether this ledger begins with all releases of the ledger `other`, in the same order."""
        if not other._runs:
            return True
        *before, (event, count) = other._runs
        run = self._runs[len(before) : len(before) + 1]
        same_event = bool(run) and run[0][0] == event and run[0][1] >= count
        return same_event and self._runs[: len(before)] == before

    def entries_after(self, prefix: "PrivacyLedger") -> tuple[tuple[Event, int], ...]:
        """Return the entries (event, count) that this ledger has after those of ledger `prefix`.

        Raises:
            ValueError: this ledger does not start with `prefix`.
        """
        if not self.starts_with(prefix):
            raise ValueError("the ledger does not start with the prefix")
        if not prefix._runs:
            return self.entries
        (event, count), *rest = self._runs[len(prefix._runs) - 1 :]
        more = count - prefix._runs[-1][1]
        return ((event, more), *rest) if more else tuple(rest)

    def compose_into(self, accountant: Accountant) -> Accountant:
        """Compose all recorded events into `accountant` and return the accountant.

        Raises:
            UnsupportedEventError: the accountant has no rule for an event. The entries before that
                event were already composed, so use a new accountant afterwards.
        """
        for event, count in self._runs:
            accountant.compose(event, count)
        return accountant

    def epsilon(
        self,
        delta: float,
        accountant: AccountantChoice = "pld",
        adjacency: Adjacency = "zero_out",
    ) -> float:
        """Return the epsilon at `delta` of all recorded releases.

        Args:
            delta: in (0, 1).
            accountant: "pld", "rdp" or "moments".
            adjacency: "zero_out", "add_remove" or "replace_one".

        Raises:
            ValueError: `delta` is not in (0, 1), the accountant or adjacency is unknown, or an
                entry is not supported.
        """
        return self.compose_into(make_accountant(accountant, adjacency=adjacency)).get_epsilon(
            delta
        )

    def epsilon_with_slack(
        self,
        delta: float,
        accountant: AccountantChoice = "pld",
        adjacency: Adjacency = "zero_out",
    ) -> float:
        """Return the epsilon at `delta` of all releases, including the noise sampler's error.

        `sampler_slack` computes what that error adds.

        Args:
            delta: in (0, 1).
            accountant: "pld", "rdp" or "moments".
            adjacency: "zero_out", "add_remove" or "replace_one".

        Raises:
            ValueError: `delta` is not in (0, 1), the accountant or adjacency is unknown, or an
                entry is not supported.
        """
        account = self.compose_into(make_accountant(accountant, adjacency=adjacency))
        return epsilon_with_slack(account.get_epsilon, delta)

    def to_text(self) -> str:
        """Return `to_list()` as JSON text; equal ledgers are encoded only once, by a cache."""
        return _text_of(tuple(self._runs))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the ledger whose `to_text` is this text; a cache parses equal texts only once.

        Raises:
            ValueError: the text is not JSON, or not a ledger.
        """
        ledger = cls()
        ledger._runs = list(_runs_of(text))
        return ledger

    def to_list(self) -> list[dict[str, Any]]:
        """Return the ledger as JSON values: a list of {"event": EVENT, "count": n}."""
        return records_of(self._runs)

    @classmethod
    def from_list(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Return the ledger whose `to_list` is this list of records.

        Raises:
            ValueError: a record is not {"event": EVENT, "count": n}; the message names its
                position.
        """
        ledger = cls()
        for position, record in enumerate(records):
            if not isinstance(record, Mapping) or set(record) != {"event", "count"}:
                raise ValueError(
                    f"ledger[{position}] must have the keys 'event' and 'count', got {record!r}"
                )
            try:
                ledger.record(event_from_dict(record["event"]), record["count"])
            except (RecursionError, ValueError) as error:
                raise ValueError(f"ledger[{position}]: {error}") from error
        return ledger

    def __eq__(self, other: object) -> bool:
        return self._runs == other._runs if isinstance(other, PrivacyLedger) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes, so it cannot be a key

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"PrivacyLedger({self._runs!r})"


def records_of(entries: Iterable[tuple[Event, int]]) -> list[dict[str, Any]]:
    """Return ledger entries as JSON values: a list of {"event": EVENT, "count": n}."""
    return [{"event": to_dict(event), "count": count} for event, count in entries]


@lru_cache(maxsize=1024)
def _text_of(runs: tuple[tuple[Event, int], ...]) -> str:
    return json.dumps(records_of(runs))


@lru_cache(maxsize=1024)
def _runs_of(text: str) -> tuple[tuple[Event, int], ...]:
    records = json.loads(text)
    if not isinstance(records, list):
        raise ValueError(f"a ledger must be a list, got {records!r:.200}")
    return PrivacyLedger.from_list(records).entries


def events_match(
    first: Sequence[tuple[Event, int]],
    second: Sequence[tuple[Event, int]],
    matches: Callable[[Event, Event], bool],
) -> bool:
    """Whether two lists of charges have equal counts, and events that differ only innermost.

    Args:
        first: pairs (event, count).
        second: pairs (event, count).
        matches: whether an innermost event of `first`, such as a `Gaussian`, fits that of `second`.
    """
    return len(first) == len(second) and all(
        count == other and _event_matches(event, partner, matches)
        for (event, count), (partner, other) in zip(first, second, strict=True)
    )


def _event_matches(first: Event, second: Event, matches: Callable[[Event, Event], bool]) -> bool:
    inner, other = getattr(first, "event", None), getattr(second, "event", None)
    if not isinstance(inner, Event) or not isinstance(other, Event):
        return matches(first, second)
    is_equal = replace(cast(Any, first), event=other) == second
    return is_equal and _event_matches(inner, other, matches)
