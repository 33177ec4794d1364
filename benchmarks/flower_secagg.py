"""Flower's own SecAgg+ functions, timed for a benchmark. Not secure: its masks have 28-bit seeds.

The parties' code is Flower's, called as its mod and its workflow call it, on some of the clients
and some of the secrets; times are scaled up to all of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord
from flwr.client.mod.secure_aggregation.secaggplus_mod import (
    SecAggPlusState,
    _collect_masked_vectors,
    _setup,
    _share_keys,
    _unmask,
)
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
)
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

MODULUS = 2**32


@dataclass(frozen=True)
class FlowerRound:
    """Seconds of processor time of one round, as measured and as scaled to all parties.

    Attributes:
        measured: what was really run.
        scaled: the whole round.
        sampled: clients whose stages were run.
    """

    measured: float
    scaled: float
    sampled: int


class _Clock:
    """Adds up measured and scaled seconds."""

    def __init__(self) -> None:
        self.measured = 0.0
        self.scaled = 0.0

    def run(self, scale: float, call: Callable[[], object]) -> object:
        start = time.process_time()
        result = call()
        seconds = time.process_time() - start
        self.measured += seconds
        self.scaled += scale * seconds
        return result


def flower_round(
    *, clients: int, threshold: int, size: int, drops: int, sampled: int
) -> FlowerRound:
    """Time a round in the complete graph, with `drops` clients lost after sharing their keys."""
    clock = _Clock()
    states = [SecAggPlusState(nid=number) for number in range(clients)]
    settings = ConfigRecord(
        {
            Key.SAMPLE_NUMBER: clients,
            Key.SHARE_NUMBER: clients,
            Key.THRESHOLD: threshold,
            Key.CLIPPING_RANGE: 8.0,
            Key.TARGET_RANGE: 2**22,
            Key.MOD_RANGE: MODULUS,
            Key.MAX_WEIGHT: 1000.0,
        }
    )
    for state in states:
        clock.run(1.0, lambda state=state: _setup(state, settings))
    keys = ConfigRecord({str(state.nid): [state.pk1, state.pk2] for state in states})
    for state in states[:sampled]:
        _one_client(clock, states, state, keys, clients / sampled, size, drops)
    _server(clock, states, clients, drops, size)
    return FlowerRound(clock.measured, clock.scaled, sampled)


def _one_client(
    clock: _Clock,
    states: list[SecAggPlusState],
    state: SecAggPlusState,
    keys: ConfigRecord,
    scale: float,
    size: int,
    drops: int,
) -> None:
    clients = len(states)
    clock.run(scale, lambda: _share_keys(state, keys))
    peers = [other for other in states if other.nid != state.nid]
    # What the peers would have sent: shares of the real length, sealed as Flower seals them.
    shares = state.rd_seed_share_dict[state.nid], state.sk1_share_dict[state.nid]
    sealed = [
        encrypt(state.ss2_dict[peer.nid], share_keys_plaintext_concat(peer.nid, state.nid, *shares))
        for peer in peers
    ]
    inbox = ConfigRecord(
        {Key.CIPHERTEXT_LIST: sealed, Key.SOURCE_LIST: [peer.nid for peer in peers]}
    )
    update = np.random.default_rng(state.nid).normal(scale=0.05, size=size).astype(np.float32)
    alive = scale * (clients - drops) / clients
    parameters = ndarrays_to_parameters([update])
    clock.run(alive, lambda: _collect_masked_vectors(state, inbox, 50, parameters))
    numbers = [one.nid for one in states]
    answer = ConfigRecord(
        {Key.ACTIVE_NODE_ID_LIST: numbers[drops:], Key.DEAD_NODE_ID_LIST: numbers[:drops]}
    )
    clock.run(alive, lambda: _unmask(state, answer))


def _server(
    clock: _Clock, states: list[SecAggPlusState], clients: int, drops: int, size: int
) -> None:
    state, alive = states[0], clients - drops
    threshold = state.threshold
    vector = [np.zeros(size, np.int64)]
    masked = [np.ones(size, np.int64)]
    clock.run(alive, lambda: parameters_addition(vector, masked))
    seed_shares = create_shares(state.rd_seed, threshold, clients)[:alive]
    key_shares = create_shares(state.sk1, threshold, clients)[:alive]

    def unmask_active() -> None:
        seed = combine_shares(seed_shares)
        parameters_subtraction(vector, pseudo_rand_gen(seed, MODULUS, [(size,)]))

    def unmask_pair() -> None:
        private = bytes_to_private_key(state.sk1)
        shared = generate_shared_key(private, bytes_to_public_key(states[1].pk1))
        parameters_subtraction(vector, pseudo_rand_gen(shared, MODULUS, [(size,)]))

    clock.run(alive, unmask_active)
    clock.run(drops, lambda: combine_shares(key_shares))
    clock.run(drops * (clients - 1), unmask_pair)
    clock.run(1.0, lambda: parameters_mod(vector, MODULUS))
