"""Where the guarantee ends."""

from collections.abc import Mapping
from typing import Any

from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence


class NoAmplification(Sentence):
    """What might lower an ε elsewhere and does not here."""

    point, kind, title = "limit", "limit", "No amplification is claimed"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "No amplification by client selection, shuffling or secure aggregation is claimed: "
            "none of them lowers the guarantee."
        )


class SeededNoise(Sentence):
    """Noise that can be taken off again."""

    point, kind, title = "limit", "limit", "The noise is simulation grade"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether the noise came from the seed."""
        return facts.mechanism is not None and facts.mechanism.noise == "seeded" and facts.released

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The noise comes from seeded streams, as a reproducible simulation needs: it protects "
            "nobody from someone who knows the seed, which is among the settings of this run."
        )


class SecureNoise(Sentence):
    """Noise that nobody can repeat."""

    point, kind, title = "limit", "limit", "The noise cannot be repeated"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether the noise came from the operating system."""
        return facts.mechanism is not None and facts.mechanism.noise == "secure" and facts.released

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Lots and noise come from the operating system's randomness and cannot be repeated, "
            "nor can this run."
        )


class FloatingPoint(Sentence):
    """The proof speaks of real numbers."""

    point, kind, title = "limit", "limit", "Noise is computed in floating point"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether there is a guarantee, which then assumes exact noise."""
        return facts.bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The proof speaks of exact Gaussian noise; a computer rounds it (Mironov 2012), and "
            "timing is not hidden."
        )


class ErrorMessages(Sentence):
    """What failing clients said is not covered."""

    point, kind, title = "limit", "limit", "Failures are not covered"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether a private client failed."""
        return facts.private and facts.run is not None and facts.run.lost_updates > 0

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "That a client failed, and its error message, may depend on its examples. Both reached "
            "the server and this report; no ε includes them."
        )


class Unfinished(Sentence):
    """The run did not end as planned."""

    point, kind, title = "limit", "limit", "The run did not finish"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Return whether a private run ended otherwise than planned."""
        return facts.private and facts.run is not None and facts.run.status != "completed"

    @property
    def text(self) -> str:
        """The sentence in words."""
        run = self.facts.run
        if run is None:
            return ""
        planned = "" if run.planned_rounds is None else f" of {run.planned_rounds:,} planned"
        return (
            f"The run is {run.status}, with {run.rounds:,}{planned} rounds finished. Stated is "
            "what was charged until then; continuing it spends more."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """How it ended, and when."""
        run = self.facts.run
        return {"status": run.status, "rounds": run.rounds} if run else {}


SENTENCES: tuple[type[Sentence], ...] = (
    NoAmplification,
    SeededNoise,
    SecureNoise,
    FloatingPoint,
    ErrorMessages,
    Unfinished,
)
