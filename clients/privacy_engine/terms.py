"""Public terms of a privacy engine: its checked arguments, and the calibrated noise.

Nothing here depends on the data, so all terms may be published.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from typing import Literal, get_args

from fedsim.accountant import make_accountant
from fedsim.accountant.accountants import (
    AccountantChoice,
    AccountantName,
    RdpOrders,
    choose_accountant,
)
from fedsim.accountant.events import Adjacency
from fedsim.clients.clipping.clipping import (
    Clipping,
    FlatClipping,
    LayerClipping,
    NoiseAllocation,
    PatternClipping,
)
from fedsim.clients.gradients.parameters import FlatParameters
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.clients.mechanisms.planner import calibrate_noise
from fedsim.clients.privacy_engine.opacus_names import accountant_name
from fedsim.clients.sampling.divided_batches import SAMPLINGS
from fedsim.clients.sampling.sampling import Sampling

logger = logging.getLogger(__name__)

# A loader that the engine did not make can draw its batches in one of these two ways only.
EngineSamplingName = Literal["poisson", "shuffle"]
LossReduction = Literal["mean", "sum"]
BatchSource = Literal["engine", "poisson"]


@dataclass(frozen=True)
class PrivacyTerms:
    """Public parameters of an engine's steps, noise and privacy accounting.

    Attributes:
        batch_size: expected batch size, by which every released sum is divided.
        sample_size: public number of examples.
        noise_multiplier: the standard deviation of the noise on the sum, divided by the clip norm.
        sampling: the sampling for which batches are charged.
        loss_reduction: how the loss of the training loop reduces over a batch.
        accountant: the accountant of the reported ε.
        adjacency: which datasets are neighbours for the reported ε.
        target_delta: δ of the calibration, and the default δ of reports.
        target_epsilon: ε to which the noise was calibrated; None if the noise was given.
        planned_steps: number of steps for which noise was calibrated; None if noise was given.
        max_physical_batch: largest number of examples in a forward pass; None without a limit.
        batches: "poisson" if the caller declares that batches of its own loader are Poisson
            samples; otherwise "engine".
        augmentation_multiplicity: number of views (changed copies) of each example.
        alphas: Rényi orders of the accountant; None stands for the accountant's default orders.
    """

    batch_size: int
    sample_size: int
    noise_multiplier: float
    sampling: Sampling
    loss_reduction: LossReduction
    accountant: AccountantName
    adjacency: Adjacency
    target_delta: float
    target_epsilon: float | None = None
    planned_steps: int | None = None
    max_physical_batch: int | None = None
    batches: BatchSource = "engine"
    augmentation_multiplicity: int = 1
    alphas: tuple[float, ...] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in a pass over the data: ⌈sample_size / batch_size⌉."""
        return math.ceil(self.sample_size / self.batch_size)

    @property
    def by_epoch(self) -> bool:
        """Whether one privacy event is charged for each epoch, not for each step."""
        return self.sampling.scheme.by_epoch

    @property
    def accountant_choice(self) -> AccountantChoice:
        """The accountant of the reported ε, with its orders."""
        return choose_accountant(self.accountant, self.alphas)


def privacy_terms(
    *,
    batch_size: int,
    sample_size: int,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float,
    steps: int | None,
    epochs: float | None,
    sampling: EngineSamplingName,
    loss_reduction: LossReduction,
    accountant: AccountantName | None,
    adjacency: Adjacency,
    max_physical_batch: int | None,
    batches: BatchSource,
    augmentation_multiplicity: int,
    alphas: Sequence[float] | None = None,
) -> PrivacyTerms:
    """Return the terms of an engine from the arguments of `PrivacyEngine`, which are checked.

    If `target_epsilon` is given, the noise is calibrated to it.

    Raises:
        ValueError: an argument is outside its range, or arguments exclude each other.
    """
    sample_size = _checked_count("sample_size", sample_size, "the public number of examples")
    batch_size = _checked_count("batch_size", batch_size, "the expected batch size")
    if batch_size > sample_size:
        raise ValueError(
            f"batch_size must be at most sample_size={sample_size}, got {batch_size}: the sampling "
            "rate is batch_size / sample_size"
        )
    _one_of("sampling", sampling, get_args(EngineSamplingName))
    _one_of("loss_reduction", loss_reduction, get_args(LossReduction))
    _one_of("batches", batches, get_args(BatchSource))
    if batches == "poisson" and sampling != "poisson":
        raise ValueError(
            f"batches='poisson' declares Poisson samples, but sampling is {sampling!r}; leave "
            f"batches out"
        )
    augmentation_multiplicity = _checked_count(
        "augmentation_multiplicity", augmentation_multiplicity, "the views of each example"
    )
    accountant, orders = _accountant(accountant_name(accountant), alphas, target_epsilon)
    make_accountant(accountant, adjacency=adjacency)  # refuses unknown names, listing the known
    check_physical_batch(max_physical_batch)
    _check_delta(target_delta, sample_size)
    drawn = _make_sampling(sampling, batch_size, sample_size, adjacency)
    planned = _planned_steps(
        noise_multiplier, target_epsilon, steps, epochs, sample_size / batch_size
    )
    if target_epsilon is None or planned is None:
        noise = _noise_multiplier(noise_multiplier)
    else:
        noise = calibrate_noise(
            drawn,
            planned,
            target_epsilon=target_epsilon,
            accounting=Accounting(target_delta, accountant, adjacency),
            interpolate=True,
        )
    return PrivacyTerms(
        batch_size=batch_size,
        sample_size=sample_size,
        noise_multiplier=noise,
        sampling=drawn,
        loss_reduction=loss_reduction,
        accountant=accountant,
        adjacency=adjacency,
        target_delta=target_delta,
        target_epsilon=target_epsilon,
        planned_steps=planned,
        max_physical_batch=max_physical_batch,
        batches=batches,
        augmentation_multiplicity=augmentation_multiplicity,
        alphas=orders,
    )


def _accountant(
    name: AccountantName | None, alphas: Sequence[float] | None, target_epsilon: float | None
) -> tuple[AccountantName, tuple[float, ...] | None]:
    """Return the accountant's name, and the given Rényi orders or None."""
    if alphas is None:
        return name or "pld", None
    if name not in (None, "rdp"):
        raise ValueError(
            f"alphas are Rényi orders, and accountant={name!r} takes none; leave one of them out"
        )
    if target_epsilon is not None:
        raise ValueError(
            "alphas and target_epsilon exclude each other: the noise is calibrated with all orders "
            "of the accountant; leave alphas out"
        )
    return "rdp", RdpOrders(tuple(alphas)).orders


def mechanism_for(
    terms: PrivacyTerms,
    parameters: FlatParameters,
    max_grad_norm: float | Sequence[float] | Clipping,
    allocation: NoiseAllocation,
) -> DpSgdMechanism:
    """Return the DP-SGD mechanism of an engine.

    Args:
        terms: the engine's public terms.
        parameters: the model's trainable parameters.
        max_grad_norm: a number is the clip norm of the whole gradient. A sequence has one clip norm
            for each layer (a module that directly holds trainable parameters, in the model's order)
            or one for each trainable tensor. A `Clipping` is used unchanged.
        allocation: how the noise is divided among groups of parameters.

    Raises:
        ValueError: a clip norm is not positive, or is infinite although noise is added. Or the
            sequence has a length that is neither the number of layers nor of tensors. Or the noise
            does not fit the model.
    """
    noise, clipping = terms.noise_multiplier, _clipping(max_grad_norm, parameters)
    if noise > 0.0 and not math.isfinite(clipping.groups(parameters).sensitivity):
        raise ValueError(
            "max_grad_norm must be finite where noise is added, got inf: the noise is "
            "noise_multiplier * max_grad_norm; for training without privacy use noise_multiplier=0"
        )
    mechanism = DpSgdMechanism(
        sampling=terms.sampling,
        clipping=clipping,
        noise_multiplier=noise,
        expected_batch=float(terms.batch_size),
        allocation=allocation,
        max_physical_batch=terms.max_physical_batch,
        largest_batch=terms.sample_size,
    ).for_model(parameters)
    return mechanism if terms.target_epsilon is None else mechanism.with_effective_noise(noise)


def _clipping(
    max_grad_norm: float | Sequence[float] | Clipping, parameters: FlatParameters
) -> Clipping:
    if isinstance(max_grad_norm, Clipping):
        return max_grad_norm
    if not isinstance(max_grad_norm, Sequence):
        return FlatClipping(_checked_bound(max_grad_norm))
    bounds = tuple(map(_checked_bound, max_grad_norm))
    layers = dict.fromkeys(name.rpartition(".")[0] for name in parameters.names)
    if len(bounds) == len(layers):
        return LayerClipping(math.hypot(*bounds), bounds=bounds)
    if len(bounds) == len(parameters.names):
        return PatternClipping(tuple(map(escape, parameters.names)), bounds)
    raise ValueError(
        f"max_grad_norm must have one bound for each of the {len(layers)} trainable layers "
        f"({', '.join(layers)}) or of the {len(parameters.names)} trainable tensors, "
        f"got {len(bounds)}"
    )


def _check_delta(target_delta: float, sample_size: int) -> None:
    if not 0.0 < target_delta < 1.0:
        raise ValueError(f"target_delta must lie strictly between 0 and 1, got {target_delta!r}")
    if target_delta * sample_size >= 1.0:
        logger.warning(
            "target_delta=%g is at least 1 / sample_size: releasing one whole example at random "
            "would satisfy it; use a δ well below %g",
            target_delta,
            1.0 / sample_size,
        )


def _make_sampling(
    sampling: EngineSamplingName, batch_size: int, sample_size: int, adjacency: Adjacency
) -> Sampling:
    drawn, _ = SAMPLINGS[sampling].for_client(sample_size, batch_size)
    adjacencies = drawn.scheme.adjacencies
    if adjacency not in adjacencies:
        raise ValueError(
            f"sampling={sampling!r} has a guarantee under {' and '.join(adjacencies)} adjacency "
            f"only, got adjacency={adjacency!r}; use sampling='poisson'"
        )
    return drawn


def _planned_steps(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    steps: int | None,
    epochs: float | None,
    batches_per_epoch: float,
) -> int | None:
    if (noise_multiplier is None) == (target_epsilon is None):
        given = "neither" if noise_multiplier is None else "both"
        raise ValueError(
            f"give exactly one of noise_multiplier and target_epsilon, got {given}; "
            "target_epsilon calibrates the noise for you"
        )
    if noise_multiplier is not None:
        if steps is not None or epochs is not None:
            raise ValueError(
                "steps and epochs calibrate the noise to target_epsilon; with noise_multiplier "
                "take as many steps as you like, and leave them out"
            )
        return None
    if (steps is None) == (epochs is None):
        given = "neither" if steps is None else "both"
        raise ValueError(
            f"target_epsilon needs exactly one of steps and epochs, got {given}: the noise is "
            "calibrated to the whole of training"
        )
    if steps is not None:
        return _checked_count("steps", steps, "the number of optimizer steps of the whole training")
    if epochs is None or not 0.0 < epochs < math.inf:
        raise ValueError(f"epochs must be finite and > 0, got {epochs!r}")
    return math.ceil(epochs * batches_per_epoch)


def _noise_multiplier(value: float | None) -> float:
    if value is None or not 0.0 <= value < math.inf:
        raise ValueError(
            f"noise_multiplier must be finite and >= 0, got {value!r} (0 trains without privacy)"
        )
    return float(value)


def _checked_bound(value: float) -> float:
    if isinstance(value, bool) or not value > 0.0:  # not: NaN
        raise ValueError(f"max_grad_norm must be > 0, got {value!r}")
    return float(value)


def check_physical_batch(most: int | None) -> None:
    """Check that the argument `max_physical_batch` is None or a whole number of at least 1."""
    if most is not None:
        _checked_count("max_physical_batch", most, "the most examples in a forward pass")


def _checked_count(name: str, value: int, meaning: str) -> int:
    """Return an argument as an int, after a check that it is a whole number of at least 1."""
    if isinstance(value, bool) or not float(value).is_integer() or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1 ({meaning}), got {value!r}")
    return int(value)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")
