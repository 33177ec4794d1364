"""Probe of noise on trained models, and on examples, on public data before round 1."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.perturbation.input import InputMechanism, noisy_examples
from fedsim.clients.perturbation.output import OutputMechanism, release_output
from fedsim.clients.training.streams import StreamKey
from fedsim.core.streams import Purpose
from fedsim.federation.federation import Federation
from fedsim.federation.initial_model import public_examples, to_tensors
from fedsim.federation.probe_evidence import NoiseEvidence
from fedsim.noise.sources import SeededNoise

_NUM_NOISE_VALUES = 1 << 13
_MAX_ROUNDS = 64
_MAX_STEPS = 20
_FAR_ABOVE = 2.0**10  # a feature's value, in bounds
_TOLERANCE = 1e-3  # of a contribution, in sensitivities


def probe_perturbation(
    federation: Federation, client: int, evidence: NoiseEvidence, *, seed: int
) -> None:
    """Measure the noise of a client and the contribution of one example, without its examples.

    Args:
        federation: assembled, with perturbation output or input.
        client: a client with noise.
        evidence: of the probe.
        seed: of the probe's streams.
    """
    plan = (federation.plans or ())[client]
    key = StreamKey(seed, client, 0)
    features, targets = to_tensors(public_examples(federation.data, 1), federation.device)
    if isinstance(plan.release, OutputMechanism):
        start = federation.shared_model.start_values
        secure = plan.secure_noise
        _probe_output(plan.release, start, features, targets, key, evidence, secure=secure)
    elif isinstance(plan.release, InputMechanism):
        _probe_input(plan.release, features, targets, key, evidence)


def _probe_output(
    mechanism: OutputMechanism,
    start: Tensor,
    features: Tensor,
    targets: Tensor,
    key: StreamKey,
    evidence: NoiseEvidence,
    *,
    secure: bool,
) -> None:
    """Probe releases of trained models; the example is alone in a data set of the client's size."""
    descent = mechanism.descent
    if descent is None:
        return
    steps = min(descent.steps, _MAX_STEPS)
    short = replace(mechanism, descent=replace(descent, steps=steps))
    size, charged = len(start), short.effective_noise_multiplier
    order = np.zeros(1, dtype=np.int64)
    large = features * (_FAR_ABOVE * descent.problem.examples.max_feature_norm)
    found, noise = (
        release_output(start, x, y, short, key.noise(), order=order[: len(x)], steps=steps)
        for x, y in ((large, targets), (large[:0], targets[:0]))
    )
    moved = float((found - noise).norm()) * short.noise_multiplier / short.deviation
    evidence.add_contribution(key.client, moved, limit=1.0 + _TOLERANCE)
    for number in range(min(max(2, -(-_NUM_NOISE_VALUES // size)), _MAX_ROUNDS)):
        own = replace(key, round_number=number + 1)
        silent = release_output(
            start,
            features[:0],
            targets[:0],
            short,
            own.noise(secure=secure),
            order=order[:0],
            steps=0,
        )
        row = (silent - start.double()) / short.deviation * (short.noise_multiplier / charged)
        evidence.add_noise(key.client, "noise", (float(row.square().sum()), size), charged=charged)
        evidence.add_row(key.client, (number, 0), row[:256].cpu())


def _probe_input(
    mechanism: InputMechanism,
    features: Tensor,
    targets: Tensor,
    key: StreamKey,
    evidence: NoiseEvidence,
) -> None:
    """Probe the noise of features, on copies of an example far above its bound and on zeros."""
    bounds = mechanism.bounds
    if bounds is None:
        return
    charged, _ = mechanism.part_multipliers
    rows = min(max(2, -(-_NUM_NOISE_VALUES // bounds.features)), _MAX_ROUNDS)
    deviation = 2.0**0.5 * mechanism.noise_multiplier * bounds.max_feature_norm
    shape = (rows, *features.shape[1:])
    large = features.expand(shape) * (_FAR_ABOVE * bounds.max_feature_norm)
    noisy = [
        noisy_examples(
            each,
            targets.expand(rows, *targets.shape[1:]),
            mechanism,
            SeededNoise(key.key_bytes(Purpose.EXAMPLE_NOISE)),
        )[0]
        .flatten(1)
        .double()
        for each in (large, torch.zeros_like(large))
    ]
    moved = float((noisy[0] - noisy[1]).norm(dim=1).max()) / bounds.max_feature_norm
    evidence.add_contribution(key.client, moved, limit=1.0 + _TOLERANCE)
    unit = noisy[1] / deviation * (2.0**0.5 * mechanism.noise_multiplier / charged)
    squares = (float(unit.square().sum()), unit.numel())
    evidence.add_noise(key.client, "noise of features", squares, charged=charged)
