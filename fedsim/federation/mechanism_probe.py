"""Probe of the mechanism before the first round: noise and clipping, as measured and as charged.

A few steps of planned blocks run on public examples, through `train_block` with the clients' own
mechanisms, on the device and in the type of the run. Their streams have a seed of their own, so no
noise of the run is used. A difference ends the run before a charge.

The clipping is measured by two steps with the same noise: in one, the loss of every example is
scaled up until its gradient exceeds the bound; in the other, it is scaled to 0. Their difference is
the clipped sum alone. All examples of a probe, and all views of an example, are the same one, so
that contributions add up.
"""

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
from torch import Tensor

from fedsim.clients.app import one_thread
from fedsim.clients.client_settings import OwnPrivacySettings
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.per_example.interface import PerExampleGradients
from fedsim.clients.dp_sgd.per_example.loss_gradient import scaled_loss
from fedsim.clients.sampling.independent_lots import FixedSizeSampling
from fedsim.clients.training.block import BlockMember, StepCallback, train_block
from fedsim.clients.training.streams import StreamKey
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import plugin_calls, refuse_replaced_functions
from fedsim.core.streams import Purpose, stream_key
from fedsim.federation.charged_noise import (
    ChargedNoise,
    factor_of_charge,
    server_draw,
    step_length_of,
)
from fedsim.federation.federation import Federation
from fedsim.federation.initial_model import public_examples, to_tensors
from fedsim.federation.perturbation_probe import probe_perturbation
from fedsim.federation.probe_evidence import NoiseEvidence
from fedsim.federation.update_probe import UpdateProbe
from fedsim.federation.vote_probe import probe_votes

MAX_BLOCKS = 8
MIN_BLOCKS = 2  # of clients that train alone, two show whether they share noise
NUM_NOISE_VALUES = 1 << 16  # of each block: noise that is 3 % too small is found
MAX_NOISE_STEPS = 64  # of a small model, in each of two rounds

_ROW_VALUES = 256  # of a release, to compare it with others
_GRADIENT_SCALE = 1e4  # of the scaled losses, in clipping bounds
_CONTRIBUTION_TOLERANCE = 1e-3
_NOISE_ROUNDS = (1, 2)
_CLIPPING_ROUND = 3


class MechanismMismatchError(FedsimError, RuntimeError):
    """The mechanism of a client is not the one that the client would be charged for."""


def probe_mechanisms(federation: Federation) -> None:
    """Check that noise and clipping are those that the clients will be charged for.

    Every distinct privacy setting is probed, up to 8 blocks. Sampling is not checked: see
    `fedsim audit`.

    Guarantee: a correct mechanism fails with probability at most 1e-9. Only public examples are
    used, no stream of the run is touched, and the shared model is reset to the global model.

    Args:
        federation: assembled; without privacy, nothing is probed.

    Raises:
        MechanismMismatchError: less noise than charged, repeated noise, or an example that
            contributes more than its clipping bound; the message names both numbers.
        PluginError: a plug-in fails, or replaced a function that the mechanism is computed with.
    """
    if federation.plans is None:
        return
    evidence = NoiseEvidence()
    mixed = not federation.experiment.plugins
    with one_thread(), plugin_calls("a plug-in failed before the first round", mixed=mixed):
        for block in _blocks_to_probe(federation):
            if federation.voting is not None:
                for client in block:
                    probe_votes(federation, client, evidence, seed=_probe_seed(federation))
            elif _perturbs(federation):
                for client in set(block) & set(_private_clients(federation)):
                    probe_perturbation(federation, client, evidence, seed=_probe_seed(federation))
            elif not federation.experiment.clips_examples:
                _probe_updates(federation, block, evidence)
            elif federation.gradients is not None:
                probe = _BlockProbe(federation, federation.gradients, block)
                probe.check_clipping(evidence)
                probe.measure_noise(evidence)
    refuse_replaced_functions()
    federation.shared_model.restart()
    for mismatch in evidence.mismatches():
        raise MechanismMismatchError(_message(mismatch))


def _probe_updates(federation: Federation, block: tuple[int, ...], evidence: NoiseEvidence) -> None:
    """Probe the whole updates of a block, in as many rounds as the noise needs."""
    probe = UpdateProbe(federation, block, _probe_seed(federation))
    probe.check_clipping(evidence, number=_CLIPPING_ROUND)
    size = federation.shared_model.parameters.size
    rounds = min(max(2, -(-NUM_NOISE_VALUES // size)), 2 * MAX_NOISE_STEPS)
    first, rows_of = _CLIPPING_ROUND + 1, next(_private_clients(federation))
    probe.measure_noise(evidence, range(first, first + rounds), rows_of=rows_of)


def _perturbs(federation: Federation) -> bool:
    """Whether the noise is on trained models, or on examples."""
    privacy = federation.experiment.privacy
    return privacy is not None and privacy.perturbation != "gradient"


def _probe_seed(federation: Federation) -> int:
    """Return the seed of the probe's streams, which no run uses."""
    key = stream_key(federation.experiment.seed, Purpose.PROBE)
    return int.from_bytes(key[:8], "little")


def _message(mismatch: str) -> str:
    return (
        f"{mismatch}, measured on public examples before round 1: nothing was charged or released; "
        "this installation or a plug-in changes the mechanism, and `fedsim audit` measures more"
    )


def _blocks_to_probe(federation: Federation) -> list[tuple[int, ...]]:
    """Return planned blocks: one for each privacy setting, and at least two if there are two."""
    terms = federation.client_privacy or ()
    first_of: dict[tuple[object, ...], int] = {}
    for client in _private_clients(federation):
        own = terms[client].privacy
        settings = tuple(getattr(own, name) for name in OwnPrivacySettings.model_fields)
        first_of.setdefault(settings, client)
    chosen: dict[tuple[int, ...], None] = {}
    for client in first_of.values():
        if len(chosen) < MAX_BLOCKS:
            chosen[_block_of(federation, client)] = None
    for client in _private_clients(federation):
        if len(chosen) >= MIN_BLOCKS:
            break
        chosen[_block_of(federation, client)] = None
    return list(chosen)


def _private_clients(federation: Federation) -> Iterator[int]:
    """Yield the clients that will train with noise."""
    for client, plan in enumerate(federation.plans or ()):
        has_unit = plan.update is not None or plan.examples
        if plan.steps_to_take and has_unit and plan.release.noise_multiplier > 0.0:
            yield client


def _block_of(federation: Federation, client: int) -> tuple[int, ...]:
    """Return the client's block in its first round."""
    rounds = federation.participation.rounds_of(client)
    return federation.blocks.plan.block_of(rounds[0], client)


def _add(
    evidence: NoiseEvidence,
    client: int,
    charged: ChargedNoise,
    kind: tuple[str, int],
    released: Tensor,
) -> None:
    """Note the noise of one group of a client in a step without gradients."""
    squares, multiplier = charged.squares(released, kind[1]), charged.multipliers[kind[1]]
    evidence.add_noise(client, kind, squares, charged=multiplier)


class _FreshNoise:
    """The fresh noise in the releases of one client, from its first step on, without gradients."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def of(self, released: Tensor, step: DpSgdMechanism) -> Tensor:
        """Return the noise in the next release (size,); of correlated noise, Σ_j c_j y_{t−j}."""
        if step.correlation is None:
            return released
        later = step.correlation.coefficients[1:]
        noise = released.double()
        self._before = [noise.clone(), *self._before[: len(later)]]
        for coefficient, past in zip(later, self._before[1:], strict=False):
            noise = noise + coefficient * past
        return noise


class _BlockProbe:
    """Steps of one planned block on public examples.

    Args:
        federation: assembled, with privacy.
        gradients: of its model.
        block: planned members, ascending; those without noise are absent.
    """

    def __init__(
        self, federation: Federation, gradients: PerExampleGradients, block: tuple[int, ...]
    ) -> None:
        self._federation = federation
        self._gradients = gradients
        self._block = block
        self._rows = federation.blocks.rows(block)
        self._seed = _probe_seed(federation)
        private = set(_private_clients(federation))
        self._charged = [
            self._charged_noise(client) if client in private else None for client in block
        ]
        example = to_tensors(public_examples(federation.data, 1), federation.device)
        self._features, self._targets = example

    @property
    def _is_correlated(self) -> bool:
        """Whether the members' noise is correlated from step to step."""
        privacy = self._federation.experiment.privacy
        return privacy is not None and privacy.noise_correlation != "none"

    def _charged_noise(self, client: int) -> ChargedNoise:
        plans = self._federation.plans or ()
        return self._charged_for(client, plans[client].step)

    def _charged_for(self, client: int, step: DpSgdMechanism) -> ChargedNoise:
        return ChargedNoise.of(
            step,
            self._gradients.parameters,
            step_length=step_length_of(self._federation, client),
            factor=factor_of_charge(self._federation, client),
        )

    def check_clipping(self, evidence: NoiseEvidence) -> None:
        """Measure the contribution of one example, from two steps with the same noise."""
        with_sums, sizes = self._first_step(_GRADIENT_SCALE)
        noise, _ = self._first_step(0.0)
        for k, (client, charged) in enumerate(zip(self._block, self._charged, strict=True)):
            if charged is None:
                continue
            for m in range(len(charged.bounds)):
                found = charged.contribution(with_sums[k], noise[k], m, lot=sizes[k])
                evidence.add_contribution(
                    client, found.norm, limit=1.0 + _CONTRIBUTION_TOLERANCE + found.rounding
                )
                if not self._server_adds_noise:
                    _add(evidence, client, charged, ("clipping", m), noise[k])

    def measure_noise(self, evidence: NoiseEvidence) -> None:
        """Measure the noise of several steps."""
        fresh = [_FreshNoise() for _ in self._block]
        for number, steps in self._noise_schedule():
            done = 0

            def record(
                lots: Sequence[np.ndarray | None],
                released: Tensor,
                used: Sequence[DpSgdMechanism | None],
                n: int = number,
            ) -> None:
                nonlocal done
                for k, step in enumerate(used):
                    if step is not None:
                        noise = fresh[k].of(released[k], step)
                        self._note_noise(evidence, self._block[k], step, (n, done), noise)
                done += 1

            self._train(number, steps, gradient_scale=0.0, on_step=record, secure=True)

    def _note_noise(
        self,
        evidence: NoiseEvidence,
        client: int,
        step: DpSgdMechanism,
        when: tuple[int, int],
        noise: Tensor,
    ) -> None:
        """Note a release without gradients, with the server's noise where it adds it.

        Args:
            evidence: of the probe.
            client: the client.
            step: its mechanism.
            when: round and step.
            noise: its release (size,).
        """
        charged, server = self._charged_for(client, step), self._server_noise(when[0])
        if server is not None:
            evidence.add_silence(client, noise)
            noise = noise + server
        # One draw of the server is for all clients: it is tested for each, and its rows once.
        kind = "noise" if server is None else f"noise of the server for client {client}"
        for m in range(len(charged.bounds)):
            _add(evidence, client, charged, (kind, m), noise)
        if server is None or client == next(_private_clients(self._federation)):
            evidence.add_row(client, when, charged.start(noise, _ROW_VALUES))

    @property
    def _server_adds_noise(self) -> bool:
        sums = self._federation.sums
        return sums is not None and sums.server_noise

    def _server_noise(self, number: int) -> Tensor | None:
        """Return the server's noise of a round (size,); None where clients add theirs."""
        privacy, size = self._federation.experiment.privacy, self._gradients.parameters.size
        if privacy is None or not self._server_adds_noise:
            return None
        seed = self._seed if privacy.noise == "seeded" else None
        return server_draw(self._federation, size, seed=seed, number=number)

    def _noise_schedule(self) -> Iterator[tuple[int, range]]:
        """Yield rounds and their steps: two rounds of several steps, or rounds of one step."""
        present = sum(charged is not None for charged in self._charged)
        present = 1 if self._server_adds_noise else present
        values = present * self._gradients.parameters.size * len(_NOISE_ROUNDS)
        steps = min(-(-NUM_NOISE_VALUES // max(1, values)), MAX_NOISE_STEPS)
        if self._federation.sums is not None:  # a part of a sum is one step
            for number in range(len(_NOISE_ROUNDS) * steps):
                yield _CLIPPING_ROUND + 1 + number, range(1)
            return
        start = 0
        for number in _NOISE_ROUNDS:
            own_steps = max(steps, 2 if number == 1 else 1)  # two show noise that repeats
            yield number, range(start, start + own_steps)
            start += own_steps if self._is_correlated else 0  # correlated noise is keyed by step

    def _first_step(self, gradient_scale: float) -> tuple[Tensor, Sequence[int]]:
        """Return the releases (K, size) of a step, and the size of each lot."""
        found: list[tuple[Tensor, Sequence[int]]] = []

        def record(lots: Sequence[np.ndarray | None], released: Tensor, used: object) -> None:
            found.append((released.clone(), [0 if lot is None else len(lot) for lot in lots]))

        self._train(_CLIPPING_ROUND, range(1), gradient_scale=gradient_scale, on_step=record)
        return found[0]

    def _train(
        self,
        round_number: int,
        steps: range,
        *,
        gradient_scale: float,
        on_step: StepCallback,
        secure: bool = False,
    ) -> None:
        """Train the block.

        Args:
            round_number: of the probe's streams.
            steps: of each member.
            gradient_scale: factor of the losses, in clipping bounds.
            on_step: sees each step.
            secure: whether noise comes from the clients' own source; then lots are empty where the
                sampling allows it, which costs no gradients. Otherwise noise is seeded.
        """
        federation = self._federation
        gradients = copy(self._gradients)
        largest = max(max(each.bounds) for each in self._charged if each is not None)
        gradients.loss = scaled_loss(gradients.loss, gradient_scale * largest)
        train_block(
            federation.shared_model,
            gradients.loss,
            gradients,
            federation.experiment.local.with_equal_views(),
            [self._member(k, round_number, steps, secure=secure) for k in range(len(self._block))],
            rows=self._rows,
            on_step=on_step,
        )

    def _member(
        self, k: int, round_number: int, steps: range, *, secure: bool
    ) -> BlockMember | None:
        plans, client = self._federation.plans, self._block[k]
        if plans is None or self._charged[k] is None:
            return None
        plan = plans[client]
        needs_all = isinstance(plan.step.sampling, FixedSizeSampling)
        examples = plan.examples if needs_all or not secure else 0
        return BlockMember(
            self._features.expand(examples, *self._features.shape[1:]),
            self._targets.expand(examples, *self._targets.shape[1:]),
            StreamKey(self._seed, client, round_number),
            steps,
            plan.step,
            secure and plan.secure_noise,
            plan.part,
        )
