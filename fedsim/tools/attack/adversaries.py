"""Adversaries of a client: what each adversary sees, and the ε that is claimed against it.

| trust       | observer | sees                                                                 |
|-------------|----------|----------------------------------------------------------------------|
| local       | server   | the client's own releases                                            |
| distributed | sums     | the smallest sum that may be opened, with the fewest honest clients  |
| distributed | server   | the client's upload (integers) with the client's share of the noise  |
| central     | models   | the client's upload (integers) with the noise of the server          |
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim.accountant.trust import Observer as Against
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.mechanisms.contract import SummedMechanism, SumPart
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.clients.training.shared_model import SharedModel
from fedsim.federation.charged_noise import ServerDraws, honest_draws, step_length_of
from fedsim.federation.federation import Federation
from fedsim.planning.alternatives import privacy_of


@dataclass(frozen=True)
class SumView:
    """A secure sum that an adversary sees: one client's upload plus the noise of other parties."""

    part: SumPart  # the client's share of the noise of the sum; if it adds none, the server does
    step_length: float  # one unit of the summed integers, over the client's sensitivity
    others: tuple[int, ...] = ()  # the other honest clients, whose noise is in the sum


@dataclass(frozen=True)
class Adversary:
    """An adversary against whom a client has a claimed ε."""

    against: Against  # which sees single uploads, opened sums, or global models
    epsilon: float  # claimed against it
    view: SumView | None = None  # None under local trust: it sees the upload itself


def adversaries_of(federation: Federation, client: int) -> list[Adversary]:
    """Return the adversaries against whom a client has a claimed ε, that of the report first."""
    plans, privacy = federation.plan.clients or (), privacy_of(federation.experiment)
    plan, step_length = plans[client], step_length_of(federation, client)
    accounting = Accounting.of(privacy, plan.delta)
    claimed = accounting.epsilon(plan.charges(0, plan.steps_to_take))
    if plan.part is None or step_length is None:
        return [Adversary("server", claimed)]
    alone = SumView(plan.part, step_length)
    if not plan.part.adds_noise:
        return [Adversary("models", claimed, alone)]
    others = [k for k, other in enumerate(plans) if other.part is not None and k != client]
    honest = tuple(others[: honest_draws(federation.experiment) - 1])
    by_share = plan.server_charges(0, plan.steps_to_take) or []
    return [
        Adversary("sums", claimed, replace(alone, others=honest)),
        Adversary("server", accounting.epsilon(by_share), alone),
    ]


@dataclass(frozen=True)
class OtherNoise:
    """The noise that all parties except the audited client add to a secure sum."""

    federation: Federation
    view: SumView
    gradients: PerExampleGradients | None  # of the client; None if updates are released
    targets: Tensor  # (n, ...), for type and shape alone: others train without examples
    model: SharedModel  # that the audited client trains
    loss: PerExampleLoss

    @cached_property
    def _releases(self) -> dict[int, SummedMechanism]:
        plans, parameters = self.federation.plan.clients or (), self.model.parameters
        return {
            client: plans[client].release_as(SummedMechanism).for_model(parameters)
            for client in self.view.others
        }

    def of_round(self, number: int, *, secure: bool) -> Tensor:
        """Return the sum of all other parties' noise in a round, as integers in float64 (size,)."""
        experiment, parameters = self.federation.experiment, self.model.parameters
        none = torch.arange(0, device=self.targets.device), self.targets[:0]
        total = torch.zeros(parameters.size, dtype=torch.float64, device=self.targets.device)
        if not self.view.part.adds_noise:
            seed = None if secure else experiment.seed
            total += ServerDraws(self.federation, parameters.size, seed=seed).of_round(number)
        members = list[BlockMember]()
        for client in self.view.others:
            release = self._releases[client]
            key = StreamKey(experiment.seed, client, number)
            steps = release.steps_of_round(range(1), range(1), has_examples=False)
            members.append(BlockMember(*none, key, steps, release, secure, self.view.part))
        stacks = self.gradients is not None and self.gradients.stacks
        blocks = [members] if stacks and members else [[member] for member in members]
        for block in blocks:
            trained = block_of(self.model, self.loss, self.gradients, experiment.local, block)
            total += trained.train().values.double().sum(0)
        return total
