"""Training files: the ε that training code of others spends, and the ε that its authors claim."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedsim.accountant import Gaussian, PrivacyLedger
from fedsim.accountant.accountants import AccountantChoice, accountant_name
from fedsim.accountant.events import Adjacency
from fedsim.clients.sampling.divided_batches import SAMPLINGS
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.formatting import delta_text, epsilon_text
from fedsim.core.limits import MAX_EXAMPLES
from fedsim.core.settings import Probability, Settings, Share
from fedsim.core.text_formats import json_value
from fedsim.experiment.load import read_checked
from fedsim.experiment.messages import PathMessage

_MAX_STEPS = 10**12  # of the accountants

Sampling = Literal["poisson", "shuffle", "balls_and_bins", "fixed_size", "full_batch"]
_Count = Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]
_Steps = Annotated[int, Field(ge=1, le=_MAX_STEPS)]
_Epochs = Annotated[float, Field(gt=0, le=_MAX_STEPS)]
_Positive = Annotated[float, Field(gt=0)]


class TrainingSection(Settings):
    """The section `training`: what the code does."""

    unit: Literal["example", "client"] = "example"  # or a client with all that it has
    examples: _Count  # or clients, for unit `client`
    batch_size: _Count | None = None  # on average; not needed if every batch has all examples
    steps: _Steps | None = None  # noisy ones; or give `epochs`
    epochs: _Epochs | None = None  # passes over the data, or full batches
    sampling: Sampling
    sampling_rate: Share | None = None  # of Poisson; `batch_size` over `examples` if absent
    drop_last: bool = False  # a shuffled pass leaves out the examples of an incomplete batch
    noise_multiplier: _Positive  # standard deviation, in clipping norms
    noise_added_to: Literal["sum", "mean"] = "sum"  # of clipped gradients
    sensitivity: _Positive = 1.0  # of the sum, in clipping norms; √k for k layers clipped alone
    adjacency: Adjacency = "zero_out"
    delta: Probability

    def ledger(self) -> PrivacyLedger:
        """Return the ledger of all releases of the training."""
        batch = self.batch_size or self.examples
        noise = self.noise_multiplier * (batch if self.noise_added_to == "mean" else 1)
        release, epochs = Gaussian(noise / self.sensitivity), self.epochs or 0.0
        if self.sampling == "full_batch":
            return PrivacyLedger().record(release, self.steps or _rounded_up(epochs))
        sampling = SAMPLINGS[self.sampling]
        by_epoch = sampling.scheme.by_epoch  # a pass is one event
        used = self.examples - (self.examples % batch if by_epoch and self.drop_last else 0)
        drawn, _ = sampling.for_client(used, batch, sampling_rate=self.sampling_rate)
        if self.steps is None:
            events = _rounded_up(epochs if by_epoch else epochs / self.rate)
        else:
            events = drawn.num_events(self.steps)
        return PrivacyLedger().record(drawn.event(release), events)

    @property
    def rate(self) -> float:
        """Probability that an example is in a batch."""
        if self.sampling_rate is not None:
            return self.sampling_rate
        return (self.batch_size or self.examples) / self.examples


def _rounded_up(number: float) -> int:
    nearest = round(number)  # 15 / 0.02 may be a bit more than 750 in floating point
    return nearest if math.isclose(number, nearest, rel_tol=1e-12) else math.ceil(number)


class ClaimedSection(Settings):
    """The section `claimed`: the ε that the authors claim; absent keys are as in `training`."""

    epsilon: Annotated[float, Field(ge=0)]  # at the δ of the training
    because: str | None = None  # how the authors derive it
    sampling: Sampling | None = None
    sampling_rate: Share | None = None
    steps: _Steps | None = None
    epochs: _Epochs | None = None
    noise_multiplier: _Positive | None = None
    noise_added_to: Literal["sum", "mean"] | None = None
    sensitivity: _Positive | None = None


class TrainingFile(Settings):
    """The content of a training file."""

    training: TrainingSection
    claimed: ClaimedSection | None = None


@dataclass(frozen=True)
class TrainingRow:
    """The ε of a training in which some values are changed, as a row of a table."""

    label: str  # words for the changes of this row
    training: TrainingSection  # with the changes of this row and of all rows above
    epsilons: Mapping[str, float]  # by the accountant's name


@dataclass(frozen=True)
class TrainingReport:
    """The ε that a training spends, and the ε that its authors claim.

    After what the code does, each row adds changes towards what the authors assume.
    """

    name: str  # path of the file
    claimed: ClaimedSection | None
    rows: tuple[TrainingRow, ...]

    @property
    def training(self) -> TrainingSection:
        """The section `training` of the file: what the code does."""
        return self.rows[0].training

    @property
    def spent(self) -> float:
        """Smallest upper bound on ε that is proven for what the code does."""
        return min(self.rows[0].epsilons.values())

    def sentences(self) -> list[str]:
        """Return sentences that say what the numbers of the report mean."""
        training, claimed = self.training, self.claimed
        lines: list[str] = []
        if claimed is not None:
            because = "" if claimed.because is None else f": {claimed.because}"
            lines.append(f"the authors say ε = {claimed.epsilon:g}{because}")
            verdict = "it is not proven: what is proven for the code is"
            if self.spent <= claimed.epsilon:
                verdict = "it holds: the code spends at most"
            lines.append(f"{verdict} ε = {epsilon_text(self.spent)}")
        if len(self.rows) > 2:
            lines.append("each row has the changes of the rows above it, too")
        if training.sampling == "shuffle":
            lines.append(
                "no amplification is claimed for shuffled batches: a pass counts as one release on "
                "known batches, and the Poisson number holds only for code that draws such batches"
            )
        if training.delta * training.examples >= 1.0:
            lines.append(
                f"δ = {delta_text(training.delta)} is not below 1/{training.examples}, so it "
                f"allows to publish all about one {training.unit}, drawn at random"
            )
        terms = f"for each {training.unit}, under {training.adjacency} adjacency"
        lines.append(f"every ε is {terms}, at δ = {delta_text(training.delta)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite ε is null."""
        return {
            "name": self.name,
            "unit": self.training.unit,
            "adjacency": self.training.adjacency,
            "delta": self.training.delta,
            "claimed_epsilon": None if self.claimed is None else self.claimed.epsilon,
            "rows": json_value([{"row": r.label, "epsilons": r.epsilons} for r in self.rows]),
        }


def report_of(
    name: str, file: TrainingFile, accountants: Sequence[AccountantChoice] = ()
) -> TrainingReport:
    """Return the report on a training file: the ε of the training, and the claimed ε.

    Guarantee: each ε of the first row is an upper bound for a training as `training` describes it.
    """
    accountants = accountants or ("pld", "rdp")
    training, rows = file.training, list[TrainingRow]()
    for change in ({}, *_changes(file)):
        training = _changed(training, change)
        spent, delta, adjacency = training.ledger().epsilon, training.delta, training.adjacency
        epsilons = {accountant_name(a): spent(delta, a, adjacency) for a in accountants}
        texts = (f"{k}: {v:g}" if isinstance(v, float) else f"{k}: {v}" for k, v in change.items())
        label = f"as if {', '.join(texts)}" if change else "as the code does it"
        rows.append(TrainingRow(label, training, epsilons))
    return TrainingReport(name, file.claimed, tuple(rows))


def _changes(file: TrainingFile) -> list[dict[str, Any]]:
    """Return the authors' other values, one thing after another; shuffled also as Poisson."""
    training, claimed = file.training, {} if file.claimed is None else _given(file.claimed)

    def changes(*keys: str) -> dict[str, Any]:
        given = {key: claimed[key] for key in keys if key in claimed}
        return {key: value for key, value in given.items() if value != getattr(training, key)}

    sample, schedule = changes("sampling", "sampling_rate"), changes("steps", "epochs")
    noise = changes("noise_multiplier", "noise_added_to", "sensitivity")
    if training.sampling != "shuffle":
        steps = [sample | schedule, noise]
    elif sample:
        steps = [sample, schedule, noise]
    else:
        steps = [schedule, noise, {"sampling": "poisson"}]
    return [step for step in steps if step]


def _given(claim: ClaimedSection) -> dict[str, Any]:
    return claim.model_dump(exclude={"epsilon", "because"}, exclude_none=True)


def _changed(training: TrainingSection, change: Mapping[str, Any]) -> TrainingSection:
    """Return a training with other values of keys; epochs replace steps, and steps epochs."""
    update = dict(change)
    if "steps" in update:
        update.setdefault("epochs", None)
    elif "epochs" in update:
        update["steps"] = None
    if update.get("sampling", "poisson") != "poisson":
        update.setdefault("sampling_rate", None)
    return training.model_copy(update=update)


def read_training(path: str | Path) -> TrainingFile:
    """Return the content of a training file."""
    return read_checked(path, TrainingFile, _problems)


def _problems(file: TrainingFile) -> Iterator[PathMessage]:
    training, claimed = file.training, file.claimed
    if (training.steps is None) == (training.epochs is None):
        yield ("training",), "give one of steps and epochs"
    yield from _sample_problems(training, "training")
    if claimed is None:
        return
    if claimed.steps is not None and claimed.epochs is not None:
        yield ("claimed",), "give steps or epochs, not both"
    elif changes := _given(claimed):
        yield from _sample_problems(_changed(training, changes), "claimed")


def _sample_problems(training: TrainingSection, section: str) -> Iterator[PathMessage]:
    sampling, batch = training.sampling, training.batch_size
    if sampling == "full_batch" and batch not in (None, training.examples):
        yield (
            (section, "sampling"),
            f"full_batch has all {training.examples} examples in each batch, and batch_size is "
            f"{batch}; write the sampling of the code",
        )
    is_needed = sampling != "full_batch" and not (sampling == "poisson" and training.sampling_rate)
    if batch is None and is_needed:
        yield (section, "sampling"), f"{sampling} needs training.batch_size"
    if batch is not None and batch > training.examples:
        yield ("training", "batch_size"), f"must be <= examples = {training.examples}, got {batch}"
    if training.sampling_rate is not None and sampling != "poisson":
        yield (section, "sampling_rate"), f"is for sampling: poisson, and sampling is {sampling}"
    if training.drop_last and sampling != "shuffle" and section == "training":
        yield (section, "drop_last"), f"is for sampling: shuffle, and sampling is {sampling}"
    if training.epochs is not None and training.epochs > _MAX_STEPS * training.rate:
        yield (section, "epochs"), f"are more than {_MAX_STEPS:,} steps"
    scheme = SAMPLING_SCHEMES.get(sampling)
    if scheme is not None and training.adjacency not in scheme.adjacencies:
        yield (section, "sampling"), scheme.refusal(training.adjacency)
