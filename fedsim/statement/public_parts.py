"""Public parts of the model: fixed features, initial weights, frozen parameters."""

from collections.abc import Mapping
from typing import Any

from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence


class PublicPartsSentence(Sentence):
    """What the model is made of that no ε covers, since it is public."""

    point, kind, title = "mechanism", "limit", "Parts of the model that are public"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a private federation has public parts in its model."""
        return facts.is_private and bool(facts.public_parts)

    @property
    def text(self) -> str:
        """The sentence in words."""
        parts = self.facts.public_parts or {}
        sentences: list[str] = []
        if names := parts.get("features"):
            sentences.append(
                f"Examples are transformed before training ({', '.join(map(str, names))}). The "
                "transforms are fixed, per example and public, so they cost no ε. Choosing them by "
                "looking at private data is tuning, which no ε of this run covers."
            )
        if parts.get("init"):
            sentences.append(
                f"The initial weights come from the file {parts['init']}, which counts as public: "
                "no ε covers what they reveal about data that trained them."
            )
        if patterns := parts.get("freeze"):
            sentences.append(
                f"The parameters {', '.join(map(str, patterns))} are not trained: they get no "
                "gradient, no noise and no update."
            )
        if parts.get("train") or parts.get("lora"):
            trained = [*map(str, parts.get("train") or ())]
            if layers := parts.get("lora"):
                trained.append(f"low-rank adapters of {', '.join(map(str, layers))}")
            sentences.append(
                f"Only these are trained: {', '.join(trained)}. All other parameters are frozen, "
                "get no noise, and are in no message."
            )
        if directions := parts.get("directions"):
            what = "1 direction" if directions == 1 else f"{directions} directions"
            sentences.append(
                f"A step releases the slopes of the loss along {what}, which are drawn from the "
                "seed and public: an upload is these numbers and nothing else, and the update "
                "along the directions is a function of them."
            )
        return " ".join(sentences)

    @property
    def values(self) -> Mapping[str, Any]:
        """The public parts."""
        return dict(self.facts.public_parts or {})


SENTENCES: tuple[type[Sentence], ...] = (PublicPartsSentence,)
