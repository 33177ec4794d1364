"""Personal models, which no ε covers."""

from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence


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


SENTENCES: tuple[type[Sentence], ...] = (PersonalModelSentence,)
