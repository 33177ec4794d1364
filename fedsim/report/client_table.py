"""The table of what every client spent, as text for people."""

import math
from dataclasses import dataclass
from typing import Any

from fedsim.report.figures import epsilon_text

MAX_CLIENTS = 200
SHOWN_CLIENTS = 100

# More clients than this are drawn as a curve instead of one bar each.
MAX_BARS = 40

_NOTHING = "–"


@dataclass(frozen=True)
class ClientRow:
    """One client's line; `worst` marks the one whose ε is the federation's."""

    client: str
    examples: str
    sampling_rate: str
    noise_multiplier: str
    rounds: str
    steps: str
    delta: str
    epsilon: str
    epsilon_rdp: str
    target_epsilon: str
    worst: bool


def client_rows(clients: list[dict[str, Any]]) -> list[ClientRow]:
    """Return a row for each client; of more than 200 only the 100 with the largest ε."""
    ordered = sorted(clients, key=lambda spend: (-_number(spend["epsilon"]), spend["client"]))
    largest = ordered[0]["epsilon"] if ordered else None
    shown = ordered[:SHOWN_CLIENTS] if len(clients) > MAX_CLIENTS else clients
    return [_row(spend, largest) for spend in shown]


def aligned_epsilon(epsilon: float | None) -> str:
    """Return `epsilon_text` with all its 4 digits, so that the numbers of a column line up."""
    text = epsilon_text(epsilon)
    digits = sum(character.isdigit() for character in text.lstrip("0."))
    if digits == 0 or digits >= 4:
        return text
    return text + ("" if "." in text else ".") + "0" * (4 - digits)


def _row(spend: dict[str, Any], largest: float | None) -> ClientRow:
    target = spend["target_epsilon"]
    return ClientRow(
        client=str(spend["client"]),
        examples=f"{spend['examples']:,}",
        sampling_rate=f"{spend['sampling_rate']:#.4g}",
        noise_multiplier=f"{spend['noise_multiplier']:#.4g}",
        rounds=f"{spend['rounds']:,}",
        steps=f"{spend['steps']:,}",
        delta=f"{spend['delta']:.4g}",
        epsilon=aligned_epsilon(spend["epsilon"]),
        epsilon_rdp=aligned_epsilon(spend["epsilon_rdp"]),
        target_epsilon=_NOTHING if target is None else f"{target:g}",
        worst=spend["epsilon"] == largest and largest != 0,
    )


def _number(epsilon: float | None) -> float:
    return math.inf if epsilon is None else epsilon
