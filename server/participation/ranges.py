"""Ranges of whole numbers as text, such as `1-20, 41-60`."""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_SHOWN_CHARACTERS = 40


def parse_ranges(text: str) -> list[range]:
    """Return the ranges of a text, ascending, disjoint and joined where they touch.

    Raises:
        ValueError: a part is neither a number nor `first-last` with first <= last.
    """
    found: list[range] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            shown = part.strip()[:_SHOWN_CHARACTERS]
            raise ValueError(f"must be whole numbers and ranges such as 1-20, 41, got {shown!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"a range must not end before it begins, got {part.strip()!r}")
        found.append(range(first, last + 1))
    return join_ranges(found)


def join_ranges(ranges: Iterable[range]) -> list[range]:
    """Return the same numbers as ascending ranges that neither overlap nor touch."""
    joined: list[range] = []
    for each in sorted(ranges, key=lambda one: one.start):
        if joined and each.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, each.stop))
        else:
            joined.append(each)
    return joined


def ranges_of(numbers: Iterable[int]) -> list[range]:
    """Return ascending, distinct numbers as ranges."""
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
    """Return ranges as text that `parse_ranges` reads."""
    return ", ".join(_texts(ranges))


def _texts(ranges: Iterable[range]) -> Iterator[str]:
    for each in ranges:
        last = each.stop - 1
        yield str(last) if each.start == last else f"{each.start}-{last}"
