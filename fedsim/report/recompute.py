"""How to recompute an ε with another library: a script made from a client's ledger."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedsim.accountant.sampler_slack import sampler_slack
from fedsim.report.contents import RunContents
from fedsim.statement.observers import OBSERVER_NAMES

# A longer script is unreadable; privacy.json has the same events for programs.
_MAX_EVENTS = 40

_RELATIONS = {"zero_out": "REPLACE_SPECIAL", "add_remove": "ADD_OR_REMOVE_ONE"}


@dataclass(frozen=True)
class Recipe:
    """A script that recomputes one client's ε with dp-accounting."""

    client: int
    script: str
    ledger_head: str | None


class _NoCounterpartError(ValueError):
    """An event that the other library does not have."""


def recipe(contents: RunContents) -> Recipe | None:
    """Return the script for the client with the largest ε, whose ε is the federation's.

    None without privacy, where nothing was spent, or where the ledger does not fit into a script.
    """
    spends = [spend for spend in contents.clients if spend["ledger"]]
    if not contents.is_private or not spends:
        return None
    spend = max(spends, key=_known_epsilon)
    try:
        script = "\n".join(_script(spend, contents.privacy))
    except _NoCounterpartError:
        return None
    return Recipe(spend["client"], script, spend.get("ledger_head"))


def _known_epsilon(spend: dict[str, Any]) -> float:
    return -1.0 if spend["epsilon"] is None else spend["epsilon"]


def _script(spend: dict[str, Any], privacy: dict[str, Any]) -> Iterator[str]:
    relation = _RELATIONS.get(privacy["adjacency"])
    if relation is None:
        raise _NoCounterpartError(f"no relation for {privacy['adjacency']!r}")
    module, name = (
        ("pld", "PLDAccountant") if privacy["accountant"] == "pld" else ("rdp", "RdpAccountant")
    )
    yield "# pip install dp-accounting"
    yield "import dp_accounting as dp"
    yield f"from dp_accounting.{module} import {name}"
    yield ""
    yield _construction(name, relation, privacy)
    for event, count in _merged(spend["ledger"]):
        yield f"accountant.compose({event}, {count})"
    yield from _answer(spend, spend["epsilon"], privacy)
    # In full: two programs agree to some digits only, and a rounded number hides how many.
    if privacy["accountant"] == "moments":
        yield f"# privacy.json, epsilon_rdp: {_in_full(spend['epsilon_rdp'])}"
        yield f"# epsilon, by the looser moments accountant: {_in_full(spend['epsilon'])}"
    else:
        yield f"# privacy.json: {_in_full(spend['epsilon'])}{_observer(privacy)}"
    yield from _against_server(spend, privacy, name, relation)


def _construction(name: str, relation: str, privacy: dict[str, Any]) -> str:
    """Return the line that makes the accountant, at the run's own orders if it has any."""
    orders = "" if privacy.get("orders") is None else f"{privacy['orders']!r}, "
    relation = f"neighboring_relation=dp.NeighboringRelation.{relation}"
    return f"accountant = {name}({orders}{relation})"


def _observer(privacy: dict[str, Any]) -> str:
    return f", against {OBSERVER_NAMES['sums']}" if privacy["trust"] == "distributed" else ""


def _against_server(
    spend: dict[str, Any], privacy: dict[str, Any], name: str, relation: str
) -> Iterator[str]:
    """Yield the same for the second ledger of distributed trust."""
    ledger = spend.get("ledger_against_server")
    if not ledger:
        return
    yield ""
    yield _construction(name, relation, privacy)
    for event, count in _merged(ledger):
        yield f"accountant.compose({event}, {count})"
    epsilon = spend.get("epsilon_against_server")
    yield from _answer(spend, epsilon, privacy)
    yield f"# privacy.json: {_in_full(epsilon)}, against {OBSERVER_NAMES['server']}"


def _answer(spend: dict[str, Any], epsilon: float | None, privacy: dict[str, Any]) -> Iterator[str]:
    """Yield the last lines: ε of the accountant, and what the sampler of noise adds to it."""
    if epsilon is None:  # infinite
        yield f"print(accountant.get_epsilon({spend['delta']!r}))"
        return
    slack = sampler_slack(epsilon, spend["delta"])
    yield f"slack = {slack.epsilon!r}  # of the sampler, see docs/finite_precision.md"
    yield f"print(accountant.get_epsilon({spend['delta']!r} * (1 - 2**-14)) + slack)"


def _in_full(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else repr(epsilon)


def _merged(ledger: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return each distinct event as an expression with its count; their order does not matter."""
    counts: dict[str, int] = {}
    for entry in ledger:
        expression = _expression(entry["event"])
        counts[expression] = counts.get(expression, 0) + entry["count"]
    if len(counts) > _MAX_EVENTS:
        raise _NoCounterpartError(f"{len(counts)} distinct events are too many for a script")
    return list(counts.items())


def _expression(event: dict[str, Any]) -> str:
    """Return the event as dp-accounting writes it; numbers are given in full."""
    match event:
        case {"type": "Gaussian", "noise_multiplier": noise}:
            return f"dp.GaussianDpEvent({float(noise)!r})"
        case {"type": "JointGaussian", "noise_multipliers": noises}:
            # All groups of parameters are one release: the script shows how their noise adds up.
            terms = " + ".join(f"{float(noise)!r}**-2" for noise in noises)
            return f"dp.GaussianDpEvent({'0.0' if 0.0 in noises else f'({terms})**-0.5'})"
        case {"type": "EpochShuffled", "event": inner}:
            return _expression(inner)  # each example is in one lot of the pass
        case {"type": "PoissonSampled", "sampling_rate": rate, "event": inner}:
            return f"dp.PoissonSampledDpEvent({float(rate)!r}, {_expression(inner)})"
        case {"type": "SelfComposed", "event": inner, "count": count}:
            return f"dp.SelfComposedDpEvent({_expression(inner)}, {int(count)})"
        case {"type": "Composed", "events": inner}:
            return f"dp.ComposedDpEvent([{', '.join(map(_expression, inner))}])"
        case {"type": "NonPrivate"}:
            return "dp.NonPrivateDpEvent()"
        case _:
            raise _NoCounterpartError(f"no counterpart for {event.get('type')!r}")
