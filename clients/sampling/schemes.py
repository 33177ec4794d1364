"""Fixed properties of each sampling: its name, its privacy event and its adjacencies.

Settings, the privacy statement and the command line read these properties, so this module imports
neither numpy nor torch. The classes that draw batches are in `sampling.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fedsim.accountant.events import Adjacency

SamplingName = Literal[
    "poisson", "fixed_size", "shuffle", "balls_and_bins", "cyclic", "cyclic_poisson"
]


@dataclass(frozen=True, kw_only=True)
class SamplingScheme:
    """Fixed properties of a way to draw batches, for settings and privacy accounting.

    Attributes:
        name: value of `privacy.sampling` in the experiment file.
        description: how batches are drawn, as in the table of docs/explain/dp_sgd.md.
        event: class name of the sampling's privacy events in a ledger.
        adjacencies: the adjacencies under which the event is a guarantee.
        obstacle: why there is no guarantee under other adjacencies; "" if there is one under each.
        by_epoch: whether one event is charged for all batches of an epoch, which may span rounds.
        is_cyclic: whether uses of an example are a fixed number of steps apart, for correlated
            noise.
        divides_rounds: whether a new epoch starts in every round under `noise: secure`.
        statement: sentence for the privacy statement, without capital letter and full stop.
    """

    name: SamplingName
    description: str
    event: str
    adjacencies: "tuple[Adjacency, ...]"
    obstacle: str = ""
    by_epoch: bool = False
    is_cyclic: bool = False
    divides_rounds: bool = False
    statement: str

    def refusal(self, adjacency: str) -> str:
        """Return the error message, with possible fixes, for an adjacency without a guarantee."""
        others = [
            scheme.name
            for scheme in SAMPLING_SCHEMES.values()
            if adjacency in scheme.adjacencies and not scheme.is_cyclic
        ]
        return (
            f"sampling {self.name} has no guarantee under adjacency {adjacency}, because "
            f"{self.obstacle}: set adjacency: {' or '.join(self.adjacencies)}, or "
            f"sampling: {' or '.join(others)}"
        )


POISSON = SamplingScheme(
    name="poisson",
    description="each example enters each batch independently",
    event="PoissonSampled",
    adjacencies=("zero_out", "add_remove", "replace_one"),
    statement="batches were drawn by Poisson sampling, and accounted for as Poisson sampling",
)
FIXED_SIZE = SamplingScheme(
    name="fixed_size",
    description="`batch_size` different examples, independently each step",
    event="FixedSizeSampled",
    adjacencies=("replace_one",),
    obstacle="another example fills the place of a missing one",
    statement="batches of fixed size were drawn without replacement, and accounted for as such",
)
SHUFFLE = SamplingScheme(
    name="shuffle",
    description="the data shuffled and cut into ⌈size / `batch_size`⌉ batches; epochs continue "
    "over rounds",
    event="EpochShuffled",
    adjacencies=("zero_out", "replace_one"),
    obstacle="one more example moves others to another batch",
    by_epoch=True,
    statement="batches were cut from shuffled data, without amplification by sampling: an epoch is "
    "accounted for as one release on known batches",
)
BALLS_AND_BINS = SamplingScheme(
    name="balls_and_bins",
    description="each example thrown into one of ⌈size / `batch_size`⌉ batches an epoch, "
    "independently; epochs continue over rounds, and start anew in each under `noise: secure`",
    event="RandomAllocation",
    adjacencies=("zero_out", "add_remove", "replace_one"),
    by_epoch=True,
    divides_rounds=True,
    statement="each epoch allocated every example to one batch at random, and is accounted for as "
    "random allocation",
)
CYCLIC = SamplingScheme(
    name="cyclic",
    description="the data cut once into ⌈size / `batch_size`⌉ batches, which come in the same "
    "order again and again",
    event="EpochShuffled",
    adjacencies=("zero_out", "replace_one"),
    obstacle="one more example moves others to another batch",
    by_epoch=True,
    is_cyclic=True,
    statement="the same batches came in the same order in every cycle, without amplification by "
    "sampling: a cycle is accounted for as one release on known batches",
)
CYCLIC_POISSON = SamplingScheme(
    name="cyclic_poisson",
    description="the data divided once into as many groups as `noise_correlation` has bands (one "
    "without it); groups take turns, and each example of a group enters the batch independently",
    event="PoissonSampled",
    adjacencies=("zero_out", "replace_one"),
    obstacle="one more example moves others to another group",
    by_epoch=True,
    is_cyclic=True,
    statement="fixed groups of examples took turns, batches were drawn from a group by Poisson "
    "sampling, and a cycle is accounted for as Poisson sampling once",
)

SAMPLING_SCHEMES: Mapping[str, SamplingScheme] = {
    scheme.name: scheme
    for scheme in (POISSON, FIXED_SIZE, SHUFFLE, BALLS_AND_BINS, CYCLIC, CYCLIC_POISSON)
}
