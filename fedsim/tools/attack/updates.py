"""Observations of a client whose whole update is one release: the client is the canary.

Each example adds a steep loss in one further parameter, so that the update exceeds its bound in
that direction alone. Its coordinate shows, up to noise, whether the client took part with its data.
Rounds without data and with the same noise show exactly what the client adds.
"""

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.accountant.arrays import Floats
from fedsim.clients.mechanisms.client_update import UpdateMechanism
from fedsim.clients.model_checks.safety import preserve_state
from fedsim.clients.training.block import BlockMember, train_block
from fedsim.clients.training.shared_model import SharedModel
from fedsim.clients.training.streams import StreamKey
from fedsim.federation.federation import Federation
from fedsim.federation.trained_model import to_tensors
from fedsim.tools.attack.canaries import add_canary_loss
from fedsim.tools.attack.observation import MAX_COORDINATES, Observations
from fedsim.tools.attack.observers import OtherNoise, SumView

_STEEPNESS = 1e4  # of a canary's loss, in bounds over the learning rate
_PAIRED_ROUNDS = 30  # run a second time without data


class CanaryClient(nn.Module):
    """A model in which all examples of a client share one canary parameter.

    Args:
        model: the experiment's model.
        steepness: gradient of each example's loss in the canary parameter.
    """

    def __init__(self, model: nn.Module, steepness: float) -> None:
        super().__init__()
        self.model, self._steepness = model, steepness
        self.canaries = nn.Parameter(torch.zeros(MAX_COORDINATES))

    def forward(self, features: Tensor) -> Tensor:
        """Return the flat outputs (n, outputs + 1) for examples (n, ...); the canary comes last."""
        outputs = self.model(features).flatten(1)
        canary = self._steepness * self.canaries[:1].expand(len(outputs), 1)
        return torch.cat([outputs, canary], dim=1)


class UpdateRounds:
    """Rounds of one client whose data are the canary.

    Args:
        federation: assembled; its unit is the client.
        client: the client.
        view: the sum of which its upload is a part; None: the upload alone is seen.
    """

    def __init__(self, federation: Federation, client: int, view: SumView | None) -> None:
        plan = (federation.plan.clients or ())[client]
        release = plan.release_as(UpdateMechanism)
        self._federation, self._client, self._plan = federation, client, plan
        self._data = to_tensors(federation.data.clients[client], federation.model.device)
        rate = federation.experiment.local.optimizer.lr
        network = deepcopy(federation.model.module)
        with preserve_state(network), torch.no_grad():
            shape = network(self._data[0][:1]).shape[1:]
        model = CanaryClient(network, _STEEPNESS * release.max_update_norm / rate)
        self._shared_model = SharedModel(model.to(federation.model.device))
        self._loss = add_canary_loss(federation.model.loss, shape)
        parameters = self._shared_model.parameters
        self.update = release.for_model(parameters)
        (self._place,) = parameters.slices([parameters.names.index("canaries")])
        self._others = (
            None
            if view is None
            else OtherNoise(
                federation, view, None, self._data[1], model=self._shared_model, loss=self._loss
            )
        )

    def observe(self, rounds: int) -> Observations:
        """Return the observations of rounds.

        Args:
            rounds: number of rounds.
        """
        secure, numbers = self._plan.secure_noise, range(1, rounds + 1)
        draws = self._federation.plan.participation
        drawn = np.array(
            [not draws.is_secret or self._client in draws.draw(number) for number in numbers]
        )
        released = np.stack(
            [
                self._release(number, secure=secure, has_data=bool(present))
                for number, present in zip(numbers, drawn, strict=True)
            ]
        )
        pairs = [
            (self._release(n, has_data=True), self._release(n, has_data=False))
            for n in numbers[:_PAIRED_ROUNDS]
        ]
        moved = np.array([found[0] - noise[0] for found, noise in pairs])
        largest = max(float(np.abs(found).max()) for found, _ in pairs)
        dtype = self._shared_model.parameters.data.dtype
        return Observations(
            released=released,
            drawn=drawn[:, np.newaxis],
            has_canary=np.ones(1, dtype=bool),
            contributions=moved,
            contribution_error=4.0 * torch.finfo(dtype).eps * largest,
            uploads=released,
            signals=moved[:, np.newaxis],
        )

    def _release(self, number: int, *, has_data: bool, secure: bool = False) -> Floats:
        """Return the canary coordinates of a round in bounds, with the sign of the canary.

        Args:
            number: the round.
            has_data: whether the client has its examples, or none.
            secure: whether noise comes from the operating system's random source.
        """
        federation = self._federation
        features, targets = self._data if has_data else (part[:0] for part in self._data)
        member = BlockMember(
            features,
            targets,
            StreamKey(federation.experiment.seed, self._client, number),
            range(federation.plan.steps.whole_rounds[self._client] if has_data else 0),
            secure=secure,
            part=self._plan.part,
            release=self.update,
        )
        local = federation.experiment.local.without_schedule().with_equal_views()
        result = train_block(self._shared_model, self._loss, None, local, [member])
        seen = result.values[0].double()
        if self._others is None:
            seen = (seen - self._shared_model.start_values) / self.update.max_update_norm
        else:
            seen = (seen + self._others.of_round(number, secure=secure)) * self._others.step_length
        return -seen[self._place].cpu().numpy()
