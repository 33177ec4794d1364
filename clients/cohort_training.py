"""A round of several clients trained together, with the result of each alone."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedsim.clients.dp_sgd.cohort import Cohort, Member, PlainCohort, PrivateCohort
from fedsim.clients.dp_sgd.mechanism import DpSgdStep
from fedsim.clients.dp_sgd.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.optimizers import make_optimizer
from fedsim.clients.settings import LocalSettings
from fedsim.clients.training import StreamKey, epochs, train_plain, train_private
from fedsim.clients.workbench import Workbench
from fedsim.server.streams import Purpose

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainee:
    """One client about to train: its data, whose randomness, and its mechanism if it is private.

    `steps` are numbers of steps over the client's whole life, as in `train_private`.
    """

    features: Tensor
    targets: Tensor
    key: StreamKey
    steps: range
    step: DpSgdStep | None = None
    secure: bool = False

    def member(self, local: LocalSettings) -> Member:
        """Return the client as a member of a cohort, at the start of its streams of the round."""
        if self.step is None:
            stream = self.key.generator(Purpose.SAMPLING)
            lots = epochs(len(self.features), local.batch_size, stream)
            return Member(None, self.features, self.targets, lots, None)
        lots = self.key.lots(
            self.step.sampling, len(self.features), first_step=self.steps.start, secure=self.secure
        )
        noise = self.key.noise(secure=self.secure)
        return Member(self.step, self.features, self.targets, lots, noise)


@dataclass(frozen=True)
class Trained:
    """What a round leaves of clients that trained together.

    Attributes:
        values: the flat values of each client's trainable parameters (clients, size).
        learnt: the bound that each client's clipping has learnt; None where it does not learn.
    """

    values: Tensor
    learnt: tuple[float | None, ...]


def train_together(
    bench: Workbench, loss: PerExampleLoss, local: LocalSettings, trainees: Sequence[Trainee]
) -> Trained:
    """Train clients of one kind and number of steps from the bench's global model.

    Guarantee: row k is what `train_alone` gives for client k, to the bit on the CPU, for models on
    which `cohorts_agree` holds.

    Raises:
        ValueError: clients that cannot go together.
        UncoveredParameterError: the model has no rule for cohorts.
    """
    if len({len(trainee.steps) for trainee in trainees}) > 1:
        raise ValueError("clients of a cohort must take the same number of steps")
    bench.restart()
    bench.model.train()
    kind: type[Cohort] = PlainCohort if trainees[0].step is None else PrivateCohort
    members = [trainee.member(local) for trainee in trainees]
    cohort = kind(bench.model, loss, members, parameters=bench.parameters)
    optimizers = [make_optimizer(local.optimizer) for _ in range(cohort.parts)]
    for _ in trainees[0].steps:
        for (values, gradient), optimizer in zip(cohort.gradients(), optimizers, strict=True):
            optimizer.step([values], [gradient])
    steps = cohort.steps if isinstance(cohort, PrivateCohort) else ()
    learnt = tuple(step.clipping.learnt for step in steps) or (None,) * len(trainees)
    return Trained(cohort.values[:, : cohort.size], learnt)


def train_alone(
    bench: Workbench,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    trainee: Trainee,
) -> float | None:
    """Train one client on the bench, from its global model; return what its clipping learnt."""
    bench.restart()
    data = (trainee.features, trainee.targets, local)
    if trainee.step is None:
        train_plain(bench.model, loss, *data, trainee.key, steps=trainee.steps)
        return None
    if gradients is None:
        raise ValueError("training with privacy needs per-example gradients")
    step = train_private(
        gradients,
        *data,
        trainee.step,
        trainee.key,
        steps=trainee.steps,
        secure=trainee.secure,
    )
    return step.clipping.learnt


def cohorts_agree(
    bench: Workbench,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    features: Tensor,
    targets: Tensor,
    step: DpSgdStep | None,
) -> bool:
    """Tell whether clients of this model train together as they train alone; log why if not.

    A few clients with lots of many lengths are trained both ways, from public examples, and
    compared: to the bit on the CPU, within rounding elsewhere. The model's values, buffers and
    modes are as before.

    Args:
        bench: the model.
        loss: one value per example.
        gradients: per-example gradients of the model; None without privacy.
        local: batch size and optimizer.
        features: a few public examples (n ≥ 1, ...).
        targets: their targets.
        step: the mechanism of some client; None without privacy.
    """
    modes = [(module, module.training) for module in bench.model.modules()]
    try:
        reason = _disagreement(bench, loss, gradients, local, features, targets, step)
    except Exception as error:  # noqa: BLE001  a model may raise anything when run in another way
        reason = f"{type(error).__name__}: {error}"
    finally:
        bench.restart()
        for module, training in modes:
            module.training = training
    if reason is not None:
        logger.info("clients train one at a time: %s", reason)
    return reason is None


def _disagreement(
    bench: Workbench,
    loss: PerExampleLoss,
    gradients: PerExampleGradients | None,
    local: LocalSettings,
    features: Tensor,
    targets: Tensor,
    step: DpSgdStep | None,
) -> str | None:
    if next(iter(bench.model.buffers()), None) is not None and step is None:
        return "the model has buffers, which training may change"
    local = local.model_copy(update={"steps": _PROBED_STEPS})
    trainees = _probes(local, features, targets, step)
    state = torch.default_generator.get_state()
    together = train_together(bench, loss, local, trainees)
    if not torch.equal(state, torch.default_generator.get_state()):
        torch.default_generator.set_state(state)
        return "the model draws random numbers (dropout)"
    for row, learnt, trainee in zip(together.values, together.learnt, trainees, strict=True):
        alone = train_alone(bench, loss, gradients, local, trainee)
        ours = bench.parameters.data
        on_cpu = row.device.type == "cpu"
        same = torch.equal(row, ours) if on_cpu else _close(row, ours)
        if not same or (on_cpu and learnt != alone):
            return "together they would round differently"
    return None


def _probes(
    local: LocalSettings, features: Tensor, targets: Tensor, step: DpSgdStep | None
) -> list[Trainee]:
    """Return clients whose lots have lengths from none to twice the batch, some of them alike."""
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
            Trainee(
                features[index.to(features.device)],
                targets[index.to(targets.device)],
                StreamKey(0, client, 1),
                range(_PROBED_STEPS),
                mechanism,
            )
        )
    return probes


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def cohort_size(model: nn.Module, size: int, setting: int | str, *, private: bool) -> int:
    """Return how many clients should train together; 1: each alone.

    The cost model. Together, clients share the cost of starting each operation, which is most of
    the time of small models and small batches, and much of the clipping. Their values and
    gradients pass through the processor once a step, so they should stay in its cache, where a
    client alone has them. Convolutions and recurrent layers run client by client and gain little.

    Processor time of a client's round of 4 steps in a cohort of as many as the model says (below:
    other numbers), over that of each alone; AMD EPYC with 1 MB of L2, whole rounds with the server:

    | MLP         | batch | clients | private | plain | with other numbers of clients   |
    |-------------|-------|---------|---------|-------|---------------------------------|
    | 64-32-10    |     8 |     256 |    0.23 |  0.30 | 4: 0.72, 0.95                   |
    | 784-32-10   |    16 |      41 |    0.58 |  0.72 | 4: 0.83, 1.06; 10: 0.66, 0.80   |
    | 784-64-10   |    32 |      20 |    0.69 |  0.85 | 40: 0.70, 0.86                  |
    | 784-128-10  |    32 |      10 |    0.73 |  0.94 | 20: 0.72, 0.92; 40: 0.74, 1.00  |
    | 784-256-10  |    32 |       5 |    0.91 |  1.07 | 10: 0.87, 1.04; 20: 0.88, 1.09  |

    Twice as many clients as the model says were no faster in rounds of 50 (1.69 and 1.66 times a
    bare loop). Private, two clients together were slower; the small CNN 1.0 with 4 and with 8.

    Args:
        model: the architecture.
        size: trainable values of a client.
        setting: `runtime.cohort`: auto, off, or the number itself.
        private: whether clients clip and add noise.
    """
    if setting == "off":
        return 1
    if isinstance(setting, int):
        return setting
    heavy = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
    if any(isinstance(module, heavy) for module in model.modules()):
        return 1
    clients = min(_MOST_CLIENTS, _CACHED_VALUES // size)
    return clients if clients >= (_FEWEST_PRIVATE if private else _FEWEST_PLAIN) else 1


_PROBED_STEPS = 3
_MOST_CLIENTS = 256
_CACHED_VALUES = 1 << 20
_FEWEST_PRIVATE, _FEWEST_PLAIN = 3, 16
