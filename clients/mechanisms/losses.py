"""Names of the losses whose targets have a public bound, or can be given one; without torch."""

from typing import Literal

LossName = Literal["cross_entropy", "bce", "mse"]
LOSSES: tuple[LossName, ...] = ("cross_entropy", "bce", "mse")
