"""Settings of `federation.participation`, and the reading of client ranges such as `1-20`."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS, MAX_SECONDS
from fedsim.core.settings import Settings, Share

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_SHOWN_CHARACTERS = 40


def parse_ranges(text: str) -> list[range]:
    """Parse a text such as `1-20, 41` into ascending ranges that neither overlap nor touch.

    Raises:
        ValueError: a part is neither a number nor `first-last` with first <= last.
    """
    ranges: list[range] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            shown = part.strip()[:_SHOWN_CHARACTERS]
            raise ValueError(f"must be whole numbers and ranges such as 1-20, 41, got {shown!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"a range must not end before it begins, got {part.strip()!r}")
        ranges.append(range(first, last + 1))
    return join_ranges(ranges)


def join_ranges(ranges: Iterable[range]) -> list[range]:
    """Merge ranges, so that the result is ascending and no two ranges overlap or touch."""
    joined: list[range] = []
    for numbers in sorted(ranges, key=lambda item: item.start):
        if joined and numbers.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, numbers.stop))
        else:
            joined.append(numbers)
    return joined


def ranges_of(numbers: Iterable[int]) -> list[range]:
    """Return the ranges of consecutive numbers in an ascending sequence without repetitions."""
    ordered = list(numbers)
    if not ordered:
        return []
    breaks = [place for place, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    ends = [*breaks, len(ordered)]
    return [
        range(ordered[start], ordered[end - 1] + 1)
        for start, end in zip([0, *breaks], ends, strict=True)
    ]


def ranges_text(ranges: Iterable[range]) -> str:
    """Return ranges as a text such as `1-20, 41`, which `parse_ranges` can read."""
    return ", ".join(
        str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"
        for numbers in ranges
    )


PARTICIPATIONS = {
    "uniform": "clients_per_round clients, a uniform sample without replacement",
    "poisson": "each client independently, with probability clients_per_round / number of clients",
    "cyclic": "groups of clients take turns",
    "trace": "clients_per_round clients, a uniform sample of those that a public trace lists",
    "min_separation": "clients_per_round clients, who take turns in an order drawn from the seed",
    "buffered": "asynchronous: a full buffer of updates is a round (FedBuff, Nguyen et al. 2022)",
}
"""Description of each participation scheme, in one line, by its name."""

MAX_AVAILABILITY_CHARACTERS = 2 << 20
"""Largest number of characters of an availability trace, which an experiment file contains."""

DurationDistribution = Literal["half_normal", "exponential", "constant"]
_Duration = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class UniformParticipation(Settings):
    """Settings of rounds that draw `clients_per_round` clients uniformly, without replacement."""

    scheme: Literal["uniform"] = Field(default="uniform", description=PARTICIPATIONS["uniform"])


class PoissonParticipation(Settings):
    """Settings of Poisson draws: each of N clients is in a round at rate clients_per_round / N."""

    scheme: Literal["poisson"] = Field(default="poisson", description=PARTICIPATIONS["poisson"])


class CyclicParticipation(Settings):
    """Settings of groups of clients that take turns; each round draws clients from one group."""

    scheme: Literal["cyclic"] = Field(default="cyclic", description=PARTICIPATIONS["cyclic"])
    groups: int | None = Field(
        default=None,
        ge=2,
        le=MAX_CLIENTS,
        description="number of groups that take turns, equal parts of the clients in their order",
    )
    members: list[str] | None = Field(
        default=None,
        min_length=2,
        description="the groups themselves instead of their number: a text of client numbers for "
        "each group, such as ['0-4', '5, 7-9']",
    )
    rounds_per_group: int = Field(
        default=1, ge=1, le=MAX_ROUNDS, description="number of consecutive rounds of a group's turn"
    )

    @field_validator("members")
    @classmethod
    def _disjoint(cls, members: list[str] | None) -> list[str] | None:
        grouped: set[int] = set()
        for text in members or ():
            for numbers in parse_ranges(text):
                if numbers.stop > MAX_CLIENTS:
                    raise ValueError(f"client numbers are below {MAX_CLIENTS:,}, got {text!r}")
                twice = grouped.intersection(numbers)
                if twice:
                    raise ValueError(f"client {min(twice)} is in two groups; remove it from one")
                grouped.update(numbers)
        return members

    @model_validator(mode="after")
    def _one_division(self) -> Self:
        if (self.groups is None) == (self.members is None):
            raise ValueError("the scheme cyclic needs groups or members, and not both")
        return self


class SeparatedParticipation(Settings):
    """Settings of clients that take turns, so that two rounds of a client are far apart."""

    scheme: Literal["min_separation"] = Field(
        default="min_separation", description=PARTICIPATIONS["min_separation"]
    )
    rounds_apart: int | None = Field(
        default=None,
        ge=1,
        le=MAX_ROUNDS,
        description="smallest difference between two rounds of a client, on which the ε of "
        "noise_correlation rests; null: the number of clients over clients_per_round, rounded down",
    )


class TraceParticipation(Settings):
    """Settings of rounds that draw uniformly from the clients that a trace lists as available."""

    scheme: Literal["trace"] = Field(default="trace", description=PARTICIPATIONS["trace"])
    path: str | None = Field(
        default=None,
        description="file.csv with the columns client and round, or client, first and last (rounds "
        "from 1), relative to the experiment file; the run records its content as availability",
    )
    availability: str | None = Field(
        default=None,
        max_length=MAX_AVAILABILITY_CHARACTERS,
        description="the trace instead of a file: a line `clients: rounds` for each group of "
        "clients, such as `0-9, 12: 1-20, 41-60`",
    )
    period: int | None = Field(
        default=None,
        ge=1,
        le=MAX_ROUNDS,
        description="number of rounds after which the trace repeats; null: it does not repeat",
    )
    min_available: int = Field(
        default=1,
        ge=1,
        le=MAX_CLIENTS,
        description="fewest available clients of a round; a round with fewer has no update",
    )

    @field_validator("availability")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        for number, line in enumerate((text or "").splitlines(), 1):
            if not line.strip():
                continue
            clients, colon, rounds = line.partition(":")
            if not colon:
                raise ValueError(f"line {number}: must be `clients: rounds`, such as 0-9: 1-20")
            try:
                parse_ranges(clients)
                parse_ranges(rounds)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        return text

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.availability is None):
            raise ValueError("the scheme trace needs path or availability, and not both")
        return self


class DurationTable(Settings):
    """Settings of simulated training times, one public number for each client."""

    path: str | None = Field(
        default=None,
        description="file.csv with the column client, relative to the experiment file; the run "
        "records its content as values",
    )
    column: str = Field(default="duration", description="column of the durations")
    values: list[_Duration] | None = Field(
        default=None, description="the durations instead of a file, in the order of the clients"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.values is None):
            raise ValueError("durations need path or values, and not both")
        return self


class BufferedParticipation(Settings):
    """Settings of asynchronous rounds on a simulated clock (FedBuff); a full buffer is a round."""

    scheme: Literal["buffered"] = Field(default="buffered", description=PARTICIPATIONS["buffered"])
    concurrency: int = Field(
        ge=1, le=MAX_CLIENTS, description="clients that train at the same time"
    )
    buffer_size: int = Field(
        default=10, ge=1, le=MAX_CLIENTS, description="updates that the server waits for"
    )
    durations: DurationDistribution | DurationTable = Field(
        default="half_normal",
        description="simulated duration of a training: half_normal (the absolute value of a "
        "standard normal), exponential (mean 1), constant (1), or a mapping with a public number "
        "for each client",
    )


class PartialWorkSettings(Settings):
    """Settings of stragglers, which do a part of their local work (`federation.partial_work`)."""

    share: Share = Field(
        description="share of the clients of each round that straggle, drawn by the seed; each "
        "takes a number of steps between 1 and one less than a whole round's, drawn uniformly"
    )
    on_partial: Literal["keep", "drop"] = Field(
        default="keep",
        description="keep: partial updates count as others (FedProx); drop: stragglers are left "
        "out of the round, and are not charged (FedAvg in the FedProx paper)",
    )


ParticipationSettings = (
    UniformParticipation
    | PoissonParticipation
    | CyclicParticipation
    | SeparatedParticipation
    | TraceParticipation
    | BufferedParticipation
)
