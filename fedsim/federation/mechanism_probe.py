"""Test of the privacy mechanism before round 1: measured noise and clipping against the charges.

Some clients make test releases from public examples, with the code, device and dtype of the run.
Their random streams have a separate seed, so no noise of the run is used. If there is less noise or
clipping than charged, the run ends before anything is charged.

Every kind of release (`ReleaseProbe`) is measured in the same two ways:

- Two releases get the same noise. One has content (such as gradients) far above its clipping bound,
  the other has none. Their difference is the clipped content, whose norm must be at most the bound.
- Releases without content are pure noise, which must be as large as charged and never repeat. Where
  the server adds the noise, a client's release must be zeros, and the noise is the server's draw.

Noise is measured in charged standard deviations: if the charge is right, its values are independent
N(0, 1).
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
from fedsim.federation.charged_noise import Release, ServerDraws, server_adds_noise
from fedsim.federation.federation import Federation
from fedsim.federation.release_probes import ReleaseProbe, Trial, probe_of

MAX_FALSE_ALARM_RATE = 1e-9  # over all tests of a probe together


@dataclass
class _Sum:
    squares: float = 0.0
    values: int = 0

    def add(self, squares: float, values: int) -> None:
        self.squares += squares
        self.values += values

    @property
    def deviation(self) -> float:
        """The measured standard deviation over the charged one."""
        return math.sqrt(self.squares / self.values)


@dataclass
class NoiseEvidence:
    """A record of measured noise and clipping before round 1, with statistical tests of both.

    Each part of a client's releases is tested for itself, and apart for each noise multiplier that
    it is charged with: noise that is too large in one ballot makes up for none in the other one.

    Attributes:
        first: the first client with noise, whose sums with the server's noise must not repeat.
    """

    first: int
    _noise: dict[tuple[int, Hashable, float], _Sum] = field(default_factory=dict)
    _rows: dict[int, dict[int, list[Floats]]] = field(default_factory=dict)
    _excess: list[str] = field(default_factory=list)

    def compare(self, probe: ReleaseProbe[Any], number: int, draws: ServerDraws | None) -> None:
        """Measure the clipped content of releases, from pairs of releases with the same noise.

        Args:
            probe: the probe of one block of the federation.
            number: the round of the pair.
            draws: the noise of the server; None where clients add the noise.
        """
        server = None if draws is None else draws.of_round(number)
        large: dict[int, Release] = {}

        def keep(release: Release) -> None:
            large[release.client] = replace(release, values=release.values.clone())

        def compare(silent: Release) -> None:
            for norm, rounding in large[silent.client].contributions(silent):
                if not norm <= 1.0 + _CONTRIBUTION_TOLERANCE + rounding < math.inf:
                    self._excess.append(
                        f"client {silent.client}: an example contributes {norm:.4g} clipping "
                        "bounds to a sum, and at most 1 is charged"
                    )
            self._note_noise(silent, "paired noise", server)

        probe.run(Trial(number, is_large=True, is_paired=True), keep)
        probe.run(Trial(number, is_paired=True), compare)

    def measure_noise(
        self, probe: ReleaseProbe[Any], trial: Trial, draws: ServerDraws | None
    ) -> None:
        """Measure the noise of releases without content, and keep the first values of two of them.

        Args:
            probe: the probe of one block of the federation.
            trial: the test round.
            draws: the noise of the server; None where clients add the noise.
        """
        server = None if draws is None else draws.of_round(trial.number)

        def note(silent: Release) -> None:
            noise = self._note_noise(silent, "noise", server)
            if server is None or silent.client == self.first:  # the server draws once for all
                rows = self._rows.setdefault(silent.client, {}).setdefault(trial.number, [])
                if len(rows) < 2:
                    rows.append(silent.parts[0].start(noise, _ROW_VALUES).numpy())

        probe.run(trial, note)

    def _note_noise(self, silent: Release, kind: str, server: Tensor | None) -> Tensor:
        """Record the noise of a release without content; return it, with the server's noise."""
        noise, client = silent.noise, silent.client
        if server is not None:
            if bool(noise.any()):
                self._excess.append(
                    f"client {client}: the client adds noise, but with privacy.trust: central only "
                    "the server adds noise"
                )
            # One draw of the server is for all clients: it is tested for each.
            noise, kind = noise + server.view_as(noise), f"{kind} of the server for client {client}"
        for number, part in enumerate(silent.parts):
            key = client, (kind, number), part.multiplier
            self._noise.setdefault(key, _Sum()).add(*part.squares(noise))
        return noise

    def mismatches(self) -> Iterator[str]:
        """Yield a message for each measurement that contradicts the charge.

        Guarantee: a correct mechanism yields a message with probability at most 1e-9.
        """
        pooled: dict[Hashable, _Sum] = {}
        for (_, kind, _), total in self._noise.items():
            pooled.setdefault(kind, _Sum()).add(total.squares, total.values)
        pairs = list(self._pairs())
        tests = len(self._noise) + len(pooled) + len(pairs)
        share = MAX_FALSE_ALARM_RATE / max(1, tests)
        yield from self._excess
        for (client, _, charged), total in self._noise.items():
            if _is_too_small(total, share):
                yield (
                    f"client {client}: the noise multiplier is "
                    f"{charged * total.deviation:.4g}, and {charged:.4g} is charged "
                    f"({total.values:,} values)"
                )
        for total in pooled.values():
            if _is_too_small(total, share):
                yield (
                    f"the noise of all probed clients is {total.deviation:.4g} of what is charged "
                    f"({total.values:,} values)"
                )
        for first, second, message in pairs:
            if _is_correlated(first, second, share):
                yield f"{message}, and independent noise is charged"

    def _pairs(self) -> Iterator[tuple[Floats, Floats, str]]:
        """Yield pairs of noise rows that must be independent, with the message if they are not."""
        last: tuple[int, Floats] | None = None
        for client, rounds in self._rows.items():
            start, *steps = rounds[min(rounds)]
            others = [("round", row) for n in sorted(rounds)[1:] for row in rounds[n]]
            for period, row in [*(("step", row) for row in steps), *others]:
                yield start, row, f"client {client}: noise repeats from {period} to {period}"
            if last is not None:
                yield start, last[1], f"clients {last[0]} and {client} have noise in common"
            last = client, start


def _is_too_small(total: _Sum, miss: float) -> bool:
    """Whether a sum of squares of N(0, 1) values is too small by an exact chi-square test.

    Args:
        total: the sum of squares, and its number of values.
        miss: the probability that a correct sum is found too small.
    """
    return total.values > 0 and total.squares < 2.0 * gammaincinv(total.values / 2.0, miss)


def _is_correlated(first: Floats, second: Floats, miss: float) -> bool:
    """Whether two vectors are too correlated to be independent Gaussian noise, by an exact test.

    The squared correlation of independent Gaussian vectors is Beta(1/2, (n − 1) / 2).

    Args:
        first: a vector (n,).
        second: a vector (n,); if the lengths differ, the common start is compared.
        miss: the probability that independent vectors are found correlated.
    """
    n = min(first.size, second.size)
    first, second = first[:n], second[:n]
    scale = float(np.vdot(first, first)) * float(np.vdot(second, second))
    if n < 2 or scale == 0.0:
        return False
    squared = float(np.vdot(first, second)) ** 2 / scale
    return squared > float(betainccinv(0.5, (n - 1) / 2.0, miss))


MAX_BLOCKS = 8
MIN_BLOCKS = 2  # two blocks of single clients show whether clients share noise

_ROW_VALUES = 256  # noise values of a release that are compared with other releases
_CONTRIBUTION_TOLERANCE = 1e-3


class MechanismMismatchError(FedsimError, RuntimeError):
    """Error of a client whose measured noise or clipping differs from what is to be charged."""


def probe_mechanisms(federation: Federation) -> None:
    """Measure the noise and clipping of clients, and compare both with what is to be charged.

    Every distinct privacy setting is tested, in at most 8 blocks (groups of clients that train
    together). The sampling of batches is not checked; `fedsim audit` checks it.

    Guarantee: a correct mechanism fails with probability at most 1e-9. Only public examples are
    used. No random stream of the run is used, and the shared model is reset to the global model.

    Args:
        federation: an assembled federation; without privacy, nothing is tested.

    Raises:
        MechanismMismatchError: there is less noise than charged, noise repeats, or an example
            contributes more than its clipping bound; the message names both numbers.
        PluginError: a plug-in fails, or replaced a function that the mechanism is computed with.
    """
    if federation.plan.clients is None:
        return
    evidence = NoiseEvidence(next(_private_clients(federation), 0))
    mixed = not federation.experiment.plugins
    with one_thread(), plugin_calls("a plug-in failed before the first round", mixed=mixed):
        for probe in _probes(federation):
            draws = _server_draws(federation, probe.size)
            for number in probe.paired_rounds:
                evidence.compare(probe, number, draws)
            for trial in probe.noise_trials():
                evidence.measure_noise(probe, trial, draws)
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
    """Yield the clients whose releases will have noise."""
    for client, plan in enumerate(federation.plan.clients or ()):
        has_unit = plan.release.protects_client or plan.examples
        if plan.steps_to_take and has_unit and plan.release.noise_multiplier > 0.0:
            yield client


def _probes(federation: Federation) -> Iterator[ReleaseProbe[Any]]:
    """Yield a probe of each block, for those members that no earlier block has."""
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
    """Return a planned block for each privacy setting, and at least two blocks if there are two."""
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
    """Return the client's block in the first round that the client takes part in."""
    rounds = federation.plan.participation.rounds_of(client)
    return federation.blocks.plan.block_of(rounds[0], client)


def _server_draws(federation: Federation, size: int) -> ServerDraws | None:
    """Return the noise of the server in all test rounds, or None where clients add the noise."""
    privacy = federation.experiment.privacy
    if privacy is None or not server_adds_noise(federation):
        return None
    seed = _probe_seed(federation) if privacy.noise == "seeded" else None
    return ServerDraws(federation, size, seed=seed)
