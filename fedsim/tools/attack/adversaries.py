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
    """A secure sum that an adversary sees: one client's upload plus the noise of other parties.

    Attributes:
        part: the share of the noise of the sum that the client adds; if it adds none, the sum has
            noise that the server adds.
        step_length: size of one unit of the integers that are summed, divided by the client's
            sensitivity.
        others: client numbers of the other honest clients, whose noise is in the sum.
    """

    part: SumPart
    step_length: float
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adversary:
    """An adversary against whom a client has a claimed ε.

    Attributes:
        against: what the adversary sees: "server" for the client's single uploads, "sums" for the
            opened sums, "models" for the global models.
        epsilon: the ε that is claimed against the adversary.
        view: the sum in which the adversary sees the client's upload; None under local trust, where
            it sees the upload itself.
    """

    against: Against
    epsilon: float
    view: SumView | None = None


def adversaries_of(federation: Federation, client: int) -> list[Adversary]:
    """Return the adversaries against whom a client has a claimed ε.

    The first one is the adversary against whom the run's reported ε holds.

    Args:
        federation: the assembled federation, with privacy.
        client: number of a client with noise.

    Raises:
        PrivacyPlanError: the federation has no privacy.
    """
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
    """The noise that all parties except the audited client add to a secure sum.

    Attributes:
        federation: the assembled federation, with plans.
        view: the sum, which names the other parties that add noise.
        gradients: per-example gradients of the audited client's model; None if whole updates are
            released.
        targets: targets of the audited client (n, ...), of which only type and shape are used: the
            other clients train without examples here.
        model: the model that the audited client trains.
        loss: the loss of that model.
    """

    federation: Federation
    view: SumView
    gradients: PerExampleGradients | None
    targets: Tensor
    model: SharedModel
    loss: PerExampleLoss

    @cached_property
    def _releases(self) -> dict[int, SummedMechanism]:
        plans, parameters = self.federation.plan.clients or (), self.model.parameters
        return {
            client: plans[client].release_as(SummedMechanism).for_model(parameters)
            for client in self.view.others
        }

    def of_round(self, number: int, *, secure: bool) -> Tensor:
        """Return the sum of all other parties' noise in a round, as integers in float64 (size,).

        Args:
            number: number of the round.
            secure: whether noise comes from the operating system's random source.
        """
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
