"""Probe of the mechanism before the first round: noise and clipping, as measured and as charged.

The clients of a few planned blocks release public content by their own code, on the device and in
the type of the run. Their streams have a seed of their own, so no noise of the run is used. A
difference ends the run before a charge.

What is released is measured in two ways, the same for every kind of release (`ReleaseProbe`):

- two releases with the same noise, one of content far above its bound and one of nothing: their
  difference is what was clipped, and at most the bound;
- releases of nothing: noise, as large as charged and never repeated. Where the server adds the
  noise, a client's release is zeros, and the noise is the server's draw.

Noise is in charged standard deviations: under the claim, independent values of N(0, 1).
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import betainccinv, gammaincinv
from torch import Tensor

from fedsim.accountant.checks import Floats
from fedsim.clients.app import one_thread
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import plugin_calls, refuse_replaced_functions
from fedsim.core.streams import Purpose, stream_key
from fedsim.federation.charged_noise import Release, server_adds_noise, server_draw
from fedsim.federation.federation import Federation
from fedsim.federation.release_probes import ReleaseProbe, Trial, probe_of

MAX_FALSE_ALARM_RATE = 1e-9  # of all tests of a probe together


@dataclass
class _Sum:
    squares: float = 0.0
    values: int = 0

    def add(self, other: "_Sum") -> None:
        self.squares += other.squares
        self.values += other.values

    @property
    def deviation(self) -> float:
        """Standard deviation, in charged ones."""
        return math.sqrt(self.squares / self.values)


@dataclass
class NoiseEvidence:
    """Measurements of a probe."""

    _noise: dict[tuple[int, Hashable], _Sum] = field(default_factory=dict)
    _charged: dict[tuple[int, Hashable], float] = field(default_factory=dict)
    _rows: dict[int, dict[int, list[Floats]]] = field(default_factory=dict)
    _excess: list[str] = field(default_factory=list)

    def add_contribution(self, client: int, contribution: float, *, limit: float) -> None:
        """Note the measured contribution of one example.

        Args:
            client: its client.
            contribution: norm in clipping bounds.
            limit: the largest norm that is not a mismatch.
        """
        if not contribution <= limit < math.inf:
            self._excess.append(
                f"client {client}: an example contributes {contribution:.4g} clipping bounds to a "
                "sum, and at most 1 is charged"
            )

    def add_silence(self, client: int, released: Tensor) -> None:
        """Note a release that must carry no noise: the server adds it.

        Args:
            client: its client.
            released: without examples (size,).
        """
        if bool(released.any()):
            self._excess.append(
                f"client {client}: the client adds noise of its own, and the server adds that of "
                "the sum"
            )

    def add_noise(
        self, client: int, kind: Hashable, squares: tuple[float, int], *, charged: float
    ) -> None:
        """Note noise values.

        Args:
            client: the client that drew them.
            kind: noise of one kind is also tested over all clients together.
            squares: sum of their squares, in charged standard deviations, and their number.
            charged: noise multiplier that the client is charged for.
        """
        self._noise.setdefault((client, kind), _Sum()).add(_Sum(*squares))
        self._charged[client, kind] = charged

    def add_row(self, client: int, round_number: int, values: Tensor) -> None:
        """Note the start of a release, to find repeated noise; two of each round are kept.

        Args:
            client: the client that drew it.
            round_number: its round.
            values: (n,), in charged standard deviations.
        """
        rows = self._rows.setdefault(client, {}).setdefault(round_number, [])
        if len(rows) < 2:
            rows.append(values.numpy())

    def mismatches(self) -> Iterator[str]:
        """Yield a message for each measurement that contradicts the charge.

        Guarantee: for a correct mechanism there is none, up to probability 1e-9.
        """
        pooled: dict[Hashable, _Sum] = {}
        for (_, kind), found in self._noise.items():
            pooled.setdefault(kind, _Sum()).add(found)
        pairs = list(self._pairs())
        tests = len(self._noise) + len(pooled) + len(pairs)
        share = MAX_FALSE_ALARM_RATE / max(1, tests)
        yield from self._excess
        for (client, kind), found in self._noise.items():
            if _is_too_small(found, share):
                charged = self._charged[client, kind]
                yield (
                    f"client {client}: the noise multiplier is {charged * found.deviation:.4g}, "
                    f"and {charged:.4g} is charged ({found.values:,} values)"
                )
        for found in pooled.values():
            if _is_too_small(found, share):
                yield (
                    f"the noise of all probed clients is {found.deviation:.4g} of what is charged "
                    f"({found.values:,} values)"
                )
        for one, other, what in pairs:
            if _is_correlated(one, other, share):
                yield f"{what}, and independent noise is charged"

    def _pairs(self) -> Iterator[tuple[Floats, Floats, str]]:
        """Yield pairs of releases that must be independent, with the message if they are not."""
        last: tuple[int, Floats] | None = None
        for client, rounds in self._rows.items():
            start, *steps = rounds[min(rounds)]
            others = [("round", row) for n in sorted(rounds)[1:] for row in rounds[n]]
            for what, row in [*(("step", row) for row in steps), *others]:
                yield start, row, f"client {client}: noise repeats from {what} to {what}"
            if last is not None:
                yield start, last[1], f"clients {last[0]} and {client} have noise in common"
            last = client, start


def _is_too_small(found: _Sum, miss: float) -> bool:
    """Whether a sum of squares of N(0, 1) is below its quantile: chi-square, exact.

    Args:
        found: the sum.
        miss: probability that a correct sum is found too small.
    """
    return found.values > 0 and found.squares < 2.0 * gammaincinv(found.values / 2.0, miss)


def _is_correlated(one: Floats, other: Floats, miss: float) -> bool:
    """Whether two independent Gaussian vectors would be so correlated; exact.

    Their squared correlation has the law Beta(1/2, (n − 1) / 2).

    Args:
        one: (n,).
        other: (n,); of another length, the common start is compared.
        miss: probability that independent vectors are found correlated.
    """
    n = min(one.size, other.size)
    one, other = one[:n], other[:n]
    scale = float(np.vdot(one, one)) * float(np.vdot(other, other))
    if n < 2 or scale == 0.0:
        return False
    squared = float(np.vdot(one, other)) ** 2 / scale
    return squared > float(betainccinv(0.5, (n - 1) / 2.0, miss))


MAX_BLOCKS = 8
MIN_BLOCKS = 2  # of clients that train alone, two show whether they share noise

_ROW_VALUES = 256  # of a release, to compare it with others
_CONTRIBUTION_TOLERANCE = 1e-3


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
    if federation.plan.clients is None:
        return
    evidence = NoiseEvidence()
    mixed = not federation.experiment.plugins
    with one_thread(), plugin_calls("a plug-in failed before the first round", mixed=mixed):
        for probe in _probes(federation):
            measurements = _Measurements(federation, probe, evidence)
            for number in probe.paired_rounds:
                measurements.compare(number)
            for trial in probe.noise_trials():
                measurements.measure_noise(trial)
    refuse_replaced_functions()
    federation.model.shared.restart()
    for mismatch in evidence.mismatches():
        raise MechanismMismatchError(_message(mismatch))


def _message(mismatch: str) -> str:
    return (
        f"{mismatch}, measured on public examples before round 1: nothing was charged or released; "
        "this installation or a plug-in changes the mechanism, and `fedsim audit` measures more"
    )


def _private_clients(federation: Federation) -> Iterator[int]:
    """Yield the clients that will release with noise."""
    for client, plan in enumerate(federation.plan.clients or ()):
        has_unit = plan.release.protects_client or plan.examples
        if plan.steps_to_take and has_unit and plan.release.noise_multiplier > 0.0:
            yield client


def _probes(federation: Federation) -> Iterator[ReleaseProbe[Any]]:
    """Yield a probe of each block, of the clients that no block before has."""
    plans, private = federation.plan.clients or (), [*_private_clients(federation)]
    left, seed = set(private), _probe_seed(federation)
    for block in _blocks_to_probe(federation, private):
        clients = [client for client in block if client in left]
        left -= set(clients)
        if clients:
            kind = probe_of(plans[clients[0]].release)
            yield kind(federation, block, clients, seed)


def _probe_seed(federation: Federation) -> int:
    """Return the seed of the probe's streams, which no run uses."""
    key = stream_key(federation.experiment.seed, Purpose.PROBE)
    return int.from_bytes(key[:8], "little")


def _blocks_to_probe(federation: Federation, private: Sequence[int]) -> list[tuple[int, ...]]:
    """Return planned blocks: one for each privacy setting, and at least two if there are two."""
    terms = federation.plan.client_privacy or ()
    first_of: dict[tuple[object, ...], int] = {}
    for client in private:
        first_of.setdefault(terms[client].privacy.own_values, client)
    chosen: dict[tuple[int, ...], None] = {}
    for client in first_of.values():
        if len(chosen) < MAX_BLOCKS:
            chosen[_block_of(federation, client)] = None
    for client in private:
        if len(chosen) >= MIN_BLOCKS:
            break
        chosen[_block_of(federation, client)] = None
    return list(chosen)


def _block_of(federation: Federation, client: int) -> tuple[int, ...]:
    """Return the client's block in its first round."""
    rounds = federation.plan.participation.rounds_of(client)
    return federation.blocks.plan.block_of(rounds[0], client)


class _Measurements:
    """What a probe's releases are measured by.

    Args:
        federation: assembled, with plans.
        probe: of one of its blocks.
        evidence: receives the measurements.
    """

    def __init__(
        self, federation: Federation, probe: ReleaseProbe[Any], evidence: NoiseEvidence
    ) -> None:
        self._federation, self._probe, self._evidence = federation, probe, evidence
        self._first = next(_private_clients(federation))

    def compare(self, number: int) -> None:
        """Measure what the content of a release contributes, by two releases with the same noise.

        Args:
            number: the round.
        """
        server = self._server_noise(number)
        large: dict[int, Release] = {}

        def keep(found: Release) -> None:
            large[found.client] = replace(found, values=found.values.clone())

        def compare(silent: Release) -> None:
            for norm, rounding in large[silent.client].contributions(silent):
                limit = 1.0 + _CONTRIBUTION_TOLERANCE + rounding
                self._evidence.add_contribution(silent.client, norm, limit=limit)
            self._note_noise(silent, "paired noise", server)

        self._probe.run(Trial(number, is_large=True, is_paired=True), keep)
        self._probe.run(Trial(number, is_paired=True), compare)

    def measure_noise(self, trial: Trial) -> None:
        """Measure the noise of releases without content, and keep rows of them."""
        server = self._server_noise(trial.number)

        def note(silent: Release) -> None:
            noise = self._note_noise(silent, "noise", server)
            if server is None or silent.client == self._first:  # its draw is for all clients
                row = silent.parts[0].start(noise, _ROW_VALUES)
                self._evidence.add_row(silent.client, trial.number, row)

        self._probe.run(trial, note)

    def _note_noise(self, silent: Release, kind: str, server: Tensor | None) -> Tensor:
        """Note the noise of a release without content, and return it with the server's."""
        noise, client = silent.noise, silent.client
        if server is not None:
            self._evidence.add_silence(client, noise)
            # One draw of the server is for all clients: it is tested for each.
            noise, kind = noise + server.view_as(noise), f"{kind} of the server for client {client}"
        for number, part in enumerate(silent.parts):
            squares = part.squares(noise)
            self._evidence.add_noise(client, (kind, number), squares, charged=part.multiplier)
        return noise

    def _server_noise(self, number: int) -> Tensor | None:
        """Return the server's noise of a round (size,); None where clients add theirs."""
        privacy = self._federation.experiment.privacy
        if privacy is None or not server_adds_noise(self._federation):
            return None
        seed = _probe_seed(self._federation) if privacy.noise == "seeded" else None
        return server_draw(self._federation, self._probe.size, seed=seed, number=number)
