"""One round of a cohort: several clients trained together, each with its result alone."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.cohort import Cohort, Member, PlainCohort, PrivateCohort
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, PerExampleLoss
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training.local_training import (
    StreamKey,
    shuffled_batches,
    train_plain,
    train_private,
)
from fedsim.clients.training.optimizers import make_optimizer
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.streams import Purpose

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CohortMember:
    """One client of a cohort, before it trains.

    Attributes:
        features: its examples (n, ...).
        targets: their targets (n, ...).
        key: of its random streams.
        steps: numbers of its steps over its whole life, as in `train_private`.
        step: its mechanism; None without privacy.
        secure: whether lots and noise come from the operating system.
    """

    features: Tensor
    targets: Tensor
    key: StreamKey
    steps: range
    step: DpSgdMechanism | None = None
    secure: bool = False

    def with_streams(self, local: LocalSettings) -> Member:
        """Return the client with its lots and its noise of the round.

        Args:
            local: batch size of training without privacy.
        """
        if self.step is None:
            sampling = self.key.generator(Purpose.SAMPLING)
            lots = shuffled_batches(len(self.features), local.batch_size, sampling)
            return Member(None, self.features, self.targets, lots, None)
        lots = self.key.lots(
            self.step.sampling, len(self.features), first_step=self.steps.start, secure=self.secure
        )
        noise = self.key.noise(secure=self.secure)
        return Member(self.step, self.features, self.targets, lots, noise)


@dataclass(frozen=True)
class CohortResult:
    """Result of a cohort's round.

    Attributes:
        values: flat trainable values of each client (clients, size).
        adapted_clip_norm: clipping bound of each client after the round; None where it is fixed.
    """

    values: Tensor
    adapted_clip_norm: tuple[float | None, ...]


def train_together(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    local: LocalSettings,
    members: Sequence[CohortMember],
) -> CohortResult:
    """Train the members of one cohort from the global model.

    Guarantee: row k is what `train_alone` gives for client k, to the bit on the CPU, for models on
    which `cohorts_agree` holds.

    Args:
        shared_model: loaded with the global model.
        loss: one value per example.
        local: batch size and optimizer.
        members: clients of one clipping rule and number of steps.

    Raises:
        ValueError: the members differ in the number of steps or in the clipping rule.
        UncoveredParameterError: the model has no rule for cohorts.
    """
    if len({len(member.steps) for member in members}) > 1:
        raise ValueError("clients of a cohort must take the same number of steps")
    shared_model.restart()
    shared_model.model.train()
    kind: type[Cohort] = PlainCohort if members[0].step is None else PrivateCohort
    cohort = kind(
        shared_model.model,
        loss,
        [member.with_streams(local) for member in members],
        parameters=shared_model.parameters,
    )
    optimizers = [make_optimizer(local.optimizer) for _ in range(cohort.parts)]
    for _ in members[0].steps:
        for (values, gradient), optimizer in zip(cohort.gradients(), optimizers, strict=True):
            optimizer.step([values], [gradient])
    steps = cohort.steps if isinstance(cohort, PrivateCohort) else ()
    clip_norms = tuple(step.clipping.adapted_clip_norm for step in steps) or (None,) * len(members)
    return CohortResult(cohort.values[:, : cohort.size], clip_norms)


def train_alone(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    member: CohortMember,
) -> float | None:
    """Train one client from the global model; return its adapted clipping bound.

    Args:
        shared_model: loaded with the global model; holds the trained one afterwards.
        loss: one value per example.
        gradients: per-example gradients of the model; None without privacy.
        local: batch size and optimizer.
        member: the client.

    Raises:
        ValueError: `gradients` is None for a private client.
    """
    shared_model.restart()
    data = (member.features, member.targets, local)
    if member.step is None:
        train_plain(shared_model.model, loss, *data, member.key, steps=member.steps)
        return None
    if gradients is None:
        raise ValueError("training with privacy needs per-example gradients")
    step = train_private(
        gradients,
        *data,
        member.step,
        member.key,
        steps=member.steps,
        secure=member.secure,
    )
    return step.clipping.adapted_clip_norm


def cohorts_agree(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    features: Tensor,
    targets: Tensor,
    step: DpSgdMechanism | None,
) -> bool:
    """Whether cohorts of this model train as each client does alone; the reason is logged if not.

    A few clients with lots of many lengths are trained both ways, from public examples, and
    compared: to the bit on the CPU, within rounding elsewhere. The model's values, buffers and
    modes are restored.

    Args:
        shared_model: the model.
        loss: one value per example.
        gradients: per-example gradients of the model; None without privacy.
        local: batch size and optimizer.
        features: a few public examples (n ≥ 1, ...).
        targets: their targets.
        step: the mechanism of some client; None without privacy.
    """
    modes = [(module, module.training) for module in shared_model.model.modules()]
    try:
        reason = _difference(shared_model, loss, gradients, local, features, targets, step)
    except Exception as error:  # noqa: BLE001  a model may raise anything when run in another way
        reason = f"{type(error).__name__}: {error}"
    finally:
        shared_model.restart()
        for module, training in modes:
            module.training = training
    if reason is not None:
        logger.info("clients train one at a time: %s", reason)
    return reason is None


def _difference(
    shared_model: SharedModel,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    features: Tensor,
    targets: Tensor,
    step: DpSgdMechanism | None,
) -> str | None:
    if next(iter(shared_model.model.buffers()), None) is not None and step is None:
        return "the model has buffers, which training may change"
    local = local.model_copy(update={"steps": _NUM_PROBE_STEPS})
    members = _probe_members(local, features, targets, step)
    state = torch.default_generator.get_state()
    together = train_together(shared_model, loss, local, members)
    if not torch.equal(state, torch.default_generator.get_state()):
        torch.default_generator.set_state(state)
        return "the model draws random numbers (dropout)"
    for row, clip_norm, member in zip(
        together.values, together.adapted_clip_norm, members, strict=True
    ):
        alone = train_alone(shared_model, loss, gradients, local, member)
        ours = shared_model.parameters.data
        on_cpu = row.device.type == "cpu"
        same = torch.equal(row, ours) if on_cpu else _is_close(row, ours)
        if not same or (on_cpu and clip_norm != alone):
            return "a cohort would round differently"
    return None


def _probe_members(
    local: LocalSettings, features: Tensor, targets: Tensor, step: DpSgdMechanism | None
) -> list[CohortMember]:
    """Return clients with lots from 0 examples to twice the batch, some of equal length."""
    most = 2 * local.batch_size
    shares = (1.0, 1.0, 0.9, 0.7, 0.5, 0.5, 0.4, 0.2, 0.05)
    probes = []
    for client, share in enumerate(shares):
        size = most if step is not None else max(1, round(share * most) - client % 3)
        index = (torch.arange(size) + client) % len(features)
        mechanism = None
        if step is not None:
            mechanism = replace(step, sampling=PoissonSampling(share))
        probes.append(
            CohortMember(
                features[index.to(features.device)],
                targets[index.to(targets.device)],
                StreamKey(0, client, 1),
                range(_NUM_PROBE_STEPS),
                mechanism,
            )
        )
    return probes


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


_NUM_PROBE_STEPS = 3
