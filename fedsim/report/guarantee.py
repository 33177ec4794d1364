"""The guarantee in words: what an ε means, where it ends, and what to be warned of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.report.contents import RunContents
from fedsim.report.figures import epsilon_text

FALSE_POSITIVE_RATE = 0.01

_NAMED_CLIENTS = 10


@dataclass(frozen=True)
class Note:
    """A short heading with its explanation."""

    title: str
    text: str


LIMITS = (
    Note(
        "One example, not one person.",
        "A person with several examples, or with data on several clients, is protected less.",
    ),
    Note(
        "No amplification is claimed.",
        "Choosing clients at random, shuffling and secure aggregation do not lower an ε here.",
    ),
    Note(
        "Tuning runs are not charged.",
        "Every earlier run on the same data spent privacy too; this report knows of one run only.",
    ),
)

_NOISE = {
    "seeded": Note(
        "The noise is simulation grade.",
        "It comes from seeded streams and ordinary floating-point arithmetic, so that a run can be "
        "repeated: whoever knows the seed can take it off again.",
    ),
    "secure": Note(
        "The noise is computed in floating point.",
        "It comes from the operating system's randomness, but its values are rounded: the proof "
        "speaks of exact Gaussian noise.",
    ),
}


def limits(noise: str) -> tuple[Note, ...]:
    """Return what the guarantee does not cover, for a source of noise."""
    return (*LIMITS, _NOISE[noise])


def true_positive_bound(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """Return the simple bound min(1, e^ε FPR + δ) on the true positive rate of any attacker.

    It follows from the definition of (ε, δ)-differential privacy alone (Wasserman and Zhou 2010,
    arXiv:0811.2501); the mechanism that ran may well leave an attacker less.
    """
    if epsilon > -math.log(false_positive_rate):
        return 1.0
    return min(1.0, math.exp(epsilon) * false_positive_rate + delta)


def interpretation(epsilon: float, delta: float) -> str:
    """Return one plain sentence that says what ε and δ allow an attacker."""
    rate = FALSE_POSITIVE_RATE
    bound = true_positive_bound(epsilon, delta, rate)
    attacker = (
        "someone who sees all updates of a client, and guesses whether one given example was among "
        f"its training data with {rate:.0%} false alarms,"
    )
    if bound < 1:
        return (
            f"In plain words: {attacker} recognises at most {_percent_up(bound)} of the examples "
            "that were (the simple bound TPR ≤ e^ε · FPR + δ)."
        )
    return (
        f"In plain words: {attacker} is not held back by the simple bound TPR ≤ e^ε · FPR + δ, "
        f"which reaches 100% here and falls below it only for ε < {_useful_epsilon(delta)}; the "
        "noise that ran may do better than this bound can show."
    )


def warnings(contents: RunContents) -> list[Note]:
    """Return what a reader must not miss about the guarantee of a private federation."""
    if not contents.private:
        return []
    found = []
    unbounded = [spend["client"] for spend in contents.clients if spend["epsilon"] is None]
    if contents.epsilon is None:
        found.append(
            Note(
                "ε is infinite.",
                f"{_named(unbounded)} released updates without enough noise for any guarantee, so "
                "the federation as a whole has none.",
            )
        )
    loose = [spend["client"] for spend in contents.clients if _is_loose(spend)]
    if loose:
        found.append(
            Note(
                "δ is not below 1 / examples.",
                f"This concerns {_named(loose, start=False)}. With a δ this large, a client that "
                "publishes one of its examples outright would satisfy the definition; choose a "
                "smaller privacy.delta.",
            )
        )
    return found


def _is_loose(spend: dict[str, float]) -> bool:
    return spend["examples"] > 0 and spend["delta"] >= 1 / spend["examples"]


def _named(clients: Sequence[int], *, start: bool = True) -> str:
    """Return the clients in words, up to ten of them by name."""
    if not clients:
        return "Some client" if start else "some client"
    word = "client" if len(clients) == 1 else "clients"
    shown = ", ".join(str(client) for client in clients[:_NAMED_CLIENTS])
    more = len(clients) - _NAMED_CLIENTS
    text = f"{word} {shown}" + (f" and {more} more" if more > 0 else "")
    return text.capitalize() if start else text


def _percent_up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 10:g}%"


def _useful_epsilon(delta: float) -> str:
    return f"{math.log((1 - delta) / FALSE_POSITIVE_RATE):.1f}"


def guarantee_text(contents: RunContents) -> str:
    """Return the headline of the guarantee, such as `ε ≤ 7.998`."""
    if not contents.private:
        return "no differential privacy"
    sign = "≤" if contents.epsilon else "="
    return f"ε {sign} {epsilon_text(contents.epsilon)}"
