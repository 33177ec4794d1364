"""Limits of the guarantee."""

from collections.abc import Mapping
from typing import Any

from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence


class NoAmplificationSentence(Sentence):
    """Effects that may lower an ε elsewhere and are not used here."""

    point, kind, title = "limit", "limit", "No amplification is claimed"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee that no draw of clients lowers."""
        return facts.is_bounded and facts.trust.participation_rate is None

    @property
    def text(self) -> str:
        """The sentence in words."""
        if self.facts.trust.trust == "distributed":
            return (
                "No amplification by client selection or shuffling is claimed. Secure aggregation "
                "lowers the ε against an observer of sums alone, by the noise of other clients."
            )
        return (
            "No amplification by client selection, shuffling or secure aggregation is claimed: "
            "none of them lowers the ε of the guarantee."
        )


class SeededNoiseSentence(Sentence):
    """Noise from the seed, which anyone who knows the seed can remove."""

    point, kind, title = "limit", "limit", "The noise is simulation grade"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether the noise came from the seed."""
        return (
            facts.mechanism is not None and facts.mechanism.noise == "seeded" and facts.has_charges
        )

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "The noise comes from seeded streams, so that the simulation is reproducible. It gives "
            "no protection against anyone who knows the seed, which is among the settings of this "
            "run."
        )


class SecureNoiseSentence(Sentence):
    """Noise from the operating system, which cannot be repeated."""

    point, kind, title = "limit", "limit", "The noise cannot be repeated"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether the noise came from the operating system."""
        return (
            facts.mechanism is not None and facts.mechanism.noise == "secure" and facts.has_charges
        )

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Lots and noise come from the operating system's random number generator. Neither "
            "they nor this run can be repeated."
        )


class FloatingPointSentence(Sentence):
    """Computers round: what of it is in ε, and what is not."""

    point, kind, title = "limit", "limit", "Finite precision"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        mechanism = self.facts.mechanism
        slack = None if mechanism is None else mechanism.slack
        if mechanism is None or slack is None:
            return ""
        sums, examples = "", ""
        if self.facts.trust.trust == "distributed":
            sums = (
                "Integers of one grid add up exactly, so a sum has the noise of all its clients. "
            )
        if self.facts.kind.draws_lots:
            examples = (
                "The proof assumes that what an example adds depends on the model and the example "
                "alone, which a test before the first round checks. "
            )
        simulated = "" if mechanism.noise != "seeded" else ", which seeded noise simulates,"
        return (
            "Every release is made of integers: sums rounded to a public grid, and noise on it. "
            "The cost of the grid is in the noise multipliers of the ledger; that of the sampler"
            f"{simulated} is in ε: {slack.epsilon:.2g} at most (docs/finite_precision.md). "
            f"{sums}{examples}Timing is not hidden."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The slack of the sampler."""
        slack = None if self.facts.mechanism is None else self.facts.mechanism.slack
        return {} if slack is None else slack._asdict()


class ErrorMessagesSentence(Sentence):
    """Failures and their messages are outside the guarantee."""

    point, kind, title = "limit", "limit", "Failures are not covered"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a private client failed."""
        return facts.is_private and facts.run is not None and facts.run.lost_updates > 0

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "Whether a client fails, and its error message, may depend on its examples. Both "
            "reached the server and this report; no ε includes them."
        )


class UnfinishedSentence(Sentence):
    """The run did not end as planned."""

    point, kind, title = "limit", "limit", "The run did not finish"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a private run did not complete."""
        return facts.is_private and facts.run is not None and facts.run.status != "completed"

    @property
    def text(self) -> str:
        """The sentence in words."""
        run = self.facts.run
        if run is None:
            return ""
        planned = "" if run.planned_rounds is None else f" of {run.planned_rounds:,} planned"
        return (
            f"The run is {run.status}, with {run.rounds:,}{planned} rounds finished. The statement "
            "covers the charges until then; continuing it spends more."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The status of the run and its finished rounds."""
        run = self.facts.run
        return {"status": run.status, "rounds": run.rounds} if run else {}


class PersonalModelSentence(Sentence):
    """Models that clients make of their own, without noise."""

    point, kind, title = "limit", "limit", "Personal models are not covered"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a private federation has personal models."""
        return facts.is_private and facts.personal_models is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            f"A client may make a personal model ({self.facts.personal_models}) from the final "
            "global model and its own examples, without noise. No ε covers a personal model or a "
            "score of it: keep both on the client. No upload, selection of clients or end of the "
            "run depends on them, so they change no ε of the federation."
        )


SENTENCES: tuple[type[Sentence], ...] = (
    NoAmplificationSentence,
    SeededNoiseSentence,
    SecureNoiseSentence,
    FloatingPointSentence,
    ErrorMessagesSentence,
    UnfinishedSentence,
    PersonalModelSentence,
)
