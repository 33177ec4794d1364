"""Probe of the release of whole updates before the first round: noise and clipping as charged.

A planned block of clients trains on copies of one public example, with a loss scaled up until the
update exceeds its bound, and again without examples and with the same noise. The difference of the
two results is the clipped update alone. Further rounds without examples show the noise.
"""

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.dp_sgd.per_example.loss_gradient import scaled_loss
from fedsim.clients.training.block import BlockMember, BlockResult, train_block
from fedsim.clients.training.streams import StreamKey
from fedsim.clients.updates.mechanism import COUNT_SENSITIVITY, UpdateMechanism
from fedsim.federation.charged_noise import (
    charged_multipliers,
    factor_of_charge,
    server_draw,
    step_length_of,
)
from fedsim.federation.federation import Federation
from fedsim.federation.initial_model import public_examples, to_tensors
from fedsim.federation.probe_evidence import NoiseEvidence

_NUM_EXAMPLES = 4
_MAX_STEPS = 3  # of local training
_GRADIENT_SCALE = 1e4  # of the loss, in bounds
_CONTRIBUTION_TOLERANCE = 1e-3
_ROW_VALUES = 256  # of a release, to compare it with others


@dataclass(frozen=True)
class _Charged:
    """What one client is charged for.

    Attributes:
        update: noise multiplier of the update.
        count: noise multiplier of the bit; None where the bound is fixed.
        in_bounds: a value of 1 of an uploaded update, in bounds S.
        count_in_bounds: the same of the bit, in halves.
        step: length of a step of the grid, in bounds S.
    """

    update: float
    count: float | None
    in_bounds: float
    count_in_bounds: float
    step: float


class UpdateProbe:
    """Rounds of one planned block, on public examples.

    Args:
        federation: assembled; its unit is the client.
        block: planned members, ascending.
        seed: of the probe's streams.
    """

    def __init__(self, federation: Federation, block: tuple[int, ...], seed: int) -> None:
        self._federation, self._block, self._seed = federation, block, seed
        self._charged = [self._charged_for(client) for client in block]
        self._examples = to_tensors(public_examples(federation.data, 1), federation.device)
        self._size = federation.shared_model.parameters.size

    def check_clipping(self, evidence: NoiseEvidence, *, number: int) -> None:
        """Measure the contribution of a whole update, from two results with the same noise.

        Args:
            evidence: of the probe.
            number: a round of the probe's streams.
        """
        found, noise = self._train(number, _NUM_EXAMPLES), self._train(number, 0)
        for k, (client, charged) in enumerate(zip(self._block, self._charged, strict=True)):
            if charged is None:
                continue
            moved, values = found.values[k] - noise.values[k], found.values[k]
            rounding = 0.0
            if self._federation.sums is None:  # results are rounded to the model's type
                rounding = 4.0 * torch.finfo(values.dtype).eps * (_norm(values) + _norm(moved))
            rounding = rounding * charged.in_bounds + math.sqrt(self._size) * charged.step
            norm = _norm(moved) * charged.in_bounds
            limit = 1.0 + _CONTRIBUTION_TOLERANCE
            evidence.add_contribution(client, norm, limit=limit + rounding)
            one, other = found.counts[k], noise.counts[k]
            if one is not None and other is not None:
                bit = abs(one - other) * charged.count_in_bounds
                evidence.add_contribution(client, bit, limit=limit)

    def measure_noise(self, evidence: NoiseEvidence, rounds: range, *, rows_of: int) -> None:
        """Measure the noise of rounds without examples.

        Args:
            evidence: of the probe.
            rounds: of the probe's streams.
            rows_of: the client whose releases stand for the server's draws.
        """
        start = self._federation.shared_model.start_values.double()
        for number in rounds:
            result, server = self._train(number, 0, secure=True), self._server_noise(number)
            for k, (client, charged) in enumerate(zip(self._block, self._charged, strict=True)):
                if charged is None:
                    continue
                noise, count = result.values[k].double(), result.counts[k]
                if self._federation.sums is None:
                    noise = noise - start
                kind = "noise"
                if server is not None:
                    evidence.add_silence(client, noise)
                    noise, kind = noise + server[:-1], f"noise of the server for client {client}"
                    count = None if count is None else count + float(server[-1])
                unit = charged.in_bounds / charged.update
                squares = (_norm(noise) * unit) ** 2
                evidence.add_noise(client, kind, (squares, self._size), charged=charged.update)
                if count is not None and charged.count is not None:
                    size = (count * charged.count_in_bounds / charged.count) ** 2
                    evidence.add_noise(client, f"bit, {kind}", (size, 1), charged=charged.count)
                if server is None or client == rows_of:
                    row = noise[:_ROW_VALUES].cpu() * unit
                    evidence.add_row(client, (number, 0), row)

    def _charged_for(self, client: int) -> _Charged | None:
        """Return what a client is charged for; None without noise."""
        federation = self._federation
        plan = (federation.plans or ())[client]
        update, sums = plan.update, federation.sums
        if update is None or not plan.steps_to_take or not update.noise_multiplier:
            return None
        factor = factor_of_charge(federation, client)
        own, *count = (factor * one for one in charged_multipliers(update))
        length = step_length_of(federation, client)
        in_bounds = 1.0 / update.max_update_norm if length is None else length
        unit = 1.0 if sums is None else sums.count_unit or 0.0
        return _Charged(
            own,
            count[0] if count else None,
            in_bounds,
            unit / COUNT_SENSITIVITY,
            update.update_step / update.max_update_norm,
        )

    def _server_noise(self, number: int) -> Tensor | None:
        """Return the server's noise of a round (size + 1,); None where clients add theirs."""
        sums, privacy = self._federation.sums, self._federation.experiment.privacy
        if sums is None or privacy is None or not sums.server_noise:
            return None
        seed = self._seed if privacy.noise == "seeded" else None
        return server_draw(self._federation, self._size + 1, seed=seed, number=number)

    def _train(self, number: int, examples: int, *, secure: bool = False) -> BlockResult:
        """Train the block on `examples` copies of one public example.

        Args:
            number: the round.
            examples: of each member; without any, the release is noise alone.
            secure: whether noise comes from the clients' own source; otherwise it is seeded.
        """
        federation = self._federation
        updates = [plan.update for plan in federation.plans or () if plan.update is not None]
        scale = _GRADIENT_SCALE * max(update.max_update_norm for update in updates)
        loss = scaled_loss(
            federation.loss, scale / federation.experiment.local.learning_rate(number)
        )
        gradients = copy(federation.gradients)
        if gradients is not None:
            gradients.loss = loss
        return train_block(
            federation.shared_model,
            loss,
            gradients,
            federation.experiment.local.with_equal_views(),
            [self._member(k, number, examples, secure=secure) for k in range(len(self._block))],
        )

    def _member(self, k: int, number: int, examples: int, *, secure: bool) -> BlockMember | None:
        plan = (self._federation.plans or ())[self._block[k]]
        update: UpdateMechanism | None = plan.update
        if self._charged[k] is None or update is None:
            return None
        features, targets = self._examples
        whole = self._federation.steps.whole_rounds[self._block[k]]
        steps = min(whole, _MAX_STEPS) if examples else 0
        return BlockMember(
            features.expand(examples, *features.shape[1:]),
            targets.expand(examples, *targets.shape[1:]),
            StreamKey(self._seed, self._block[k], number),
            range(steps),
            secure=secure and plan.secure_noise,
            part=plan.part,
            update=update,
        )


def _norm(values: Tensor) -> float:
    """Return the L2 norm, accumulated in float64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
