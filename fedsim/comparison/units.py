"""Units of privacy in a comparison: only variants of one unit are compared with each other.

An ε that protects one example and an ε that protects everything of one client are different
promises. No ranking and no difference may have both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedsim.experiment.errors import KeyPath
from fedsim.experiment.messages import PathMessage

Baseline = str | Mapping[str, str]
"""The baseline of all variants, or the baseline of each unit."""


@dataclass(frozen=True)
class UnitGroup:
    """The variants of one unit.

    Attributes:
        unit: `example` or `client`; None if no variant has privacy.
        baseline: name of the variant that the others of the unit are compared with.
        names: all variants of the unit, in the order of the file.
    """

    unit: str | None
    baseline: str
    names: tuple[str, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs (variant, its baseline) to compare."""
        return tuple((name, self.baseline) for name in self.names if name != self.baseline)


def group_by_unit(units: Mapping[str, str | None], baseline: Baseline) -> tuple[UnitGroup, ...]:
    """Return the variants of each unit.

    A variant without privacy has no unit. Where there are two units, it belongs to those that it is
    the baseline of.

    Args:
        units: unit of each variant by name; None: without privacy.
        baseline: name of the baseline, or that of each unit.
    """
    found = tuple(dict.fromkeys(unit for unit in units.values() if unit is not None))
    if len(found) < 2:
        unit = found[0] if found else None
        return (UnitGroup(unit, _baseline_of(unit, baseline), tuple(units)),)
    return tuple(
        UnitGroup(
            unit,
            _baseline_of(unit, baseline),
            tuple(
                name
                for name, own in units.items()
                if own == unit or (own is None and name == _baseline_of(unit, baseline))
            ),
        )
        for unit in found
    )


def _baseline_of(unit: str | None, baseline: Baseline) -> str:
    if isinstance(baseline, str):
        return baseline
    return next(iter(baseline.values())) if unit is None else baseline[unit]


def unit_problems(units: Mapping[str, str | None], baseline: Baseline) -> Iterator[PathMessage]:
    """Yield why the variants of a comparison have no baseline within their unit.

    Args:
        units: as `group_by_unit`.
        baseline: as `group_by_unit`; its names exist.
    """
    found = list(dict.fromkeys(unit for unit in units.values() if unit is not None))
    named = {unit: baseline for unit in found} if isinstance(baseline, str) else dict(baseline)
    missing = [unit for unit in found if unit not in named]
    if missing:
        yield ("baseline",), f"names no variant for unit {missing[0]}; add {missing[0]}: NAME"
        return
    for unit, name in named.items():
        path: KeyPath = ("baseline",) if isinstance(baseline, str) else ("baseline", unit)
        own = units[name]
        if not isinstance(baseline, str) and unit not in found:
            yield path, f"no variant has unit {unit}; leave it out"
        elif own is not None and own != unit:
            yield (
                path,
                f"{name!r} has unit {own}, and an ε of unit {unit} cannot be compared with it: "
                f"write baseline: {{{own}: {name}, {unit}: NAME}}",
            )
    if len(found) > 1:
        for name, own in units.items():
            if own is None and name not in named.values():
                yield (
                    ("variants", name),
                    "has no privacy, hence no unit, and the comparison has two; name it as the "
                    "baseline of one, or leave it out",
                )
