"""SecAgg and SecAgg+: the exact sum with dropouts in every stage."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from fedsim.secagg.errors import (
    ContextMismatchError,
    DuplicateClientError,
    LayoutMismatchError,
    ProtocolOrderError,
    PublicKeyError,
    ShareMismatchError,
    ThresholdError,
    TooFewClientsError,
    WireError,
)


@pytest.mark.parametrize(
    ("stage", "dropped"),
    [("keys", 0), ("keys", 3), ("keys", 4), *product(("shares", "masks", "unmask"), (1, 2, 4))],
)
def test_dropouts(secure_parties: Any, same_bits: Any, stage: str, dropped: int) -> None:
    """Six clients, threshold 5 of 6 (or 2n/3 + 1 of those that began), min_clients 3."""
    scene = secure_parties(protocol="secagg")
    one = scene.masked()
    gone = set(range(dropped))
    survivors = range(6) if stage == "unmask" else range(dropped, 6)
    fails = dropped == 4 if stage == "keys" else dropped > 1  # the threshold is 5
    if not fails:
        assert same_bits(one.run(**{stage: gone}), scene.plain(survivors))
        return
    error = TooFewClientsError if stage == "keys" or (stage, dropped) == ("masks", 4) else None
    with pytest.raises(error or ThresholdError):
        one.run(**{stage: gone})


def test_dropouts_in_every_stage_at_once(secure_parties: Any, same_bits: Any) -> None:
    scene = secure_parties(clients=14, protocol={"name": "secagg", "threshold": 8})
    one = scene.masked()
    result = one.run(keys={0}, shares={1, 2}, masks={3, 4}, unmask={5})
    assert same_bits(result, scene.plain(range(5, 14)))
    assert one.server.clients == list(range(5, 14))


def test_a_sparse_graph_gives_the_same_sum(secure_parties: Any, same_bits: Any) -> None:
    scene = secure_parties(clients=60, protocol={"name": "secagg_plus", "corrupt_fraction": 0.05})
    one = scene.masked()
    result = one.run(masks={3, 17, 41}, unmask={5, 6})
    assert not one.server.graph.complete
    assert one.server.graph.threshold < 60 / 3
    assert same_bits(result, scene.plain(sorted(set(range(60)) - {3, 17, 41})))


@pytest.mark.parametrize("ring", [32, 64])
def test_secure_equals_quantized_bit_for_bit(
    secure_parties: Any, same_bits: Any, ring: int
) -> None:
    encoding = {"ring_bits": ring, "guard_bits": 1, "max_weight": 50}
    scene, control = (
        secure_parties(protocol=name, encoding=encoding, metrics={"loss": 3.5})
        for name in ("secagg", "quantized")
    )
    assert same_bits(scene.masked().run(masks={2}), control.run([0, 1, 3, 4, 5]))


def test_masked_payloads_are_uniform(secure_parties: Any) -> None:
    from scipy import stats

    scene = secure_parties(clients=4, protocol="secagg", shapes={"w": (1 << 14,)})
    one = scene.masked()
    one.keys()
    one.shares()
    requests = one.server.mask_requests()
    sent = one.clients[0].mask(requests[0]).masked
    counts = np.bincount(sent.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_wrong_share_names_its_owner_and_makes_no_model(secure_parties: Any) -> None:
    for field, place, owner in (("seed_shares", 0, 1), ("key_shares", 0, 0)):
        scene = secure_parties(protocol="secagg")
        one = scene.masked()
        one.keys()
        one.shares()
        one.masks(silent={0})
        for client, request in one.server.unmask_requests().items():
            reply = one.clients[client].unmask(request)
            if client == 1:
                shares = list(getattr(reply, field))
                shares[place] = shares[place][:-1] + bytes([shares[place][-1] ^ 1])
                reply = replace(reply, **{field: tuple(shares)})
            one.server.take_unmask(reply)
        with pytest.raises(ShareMismatchError, match=f"client {owner}: "):
            one.open()


def test_flipped_bits_of_a_masked_payload_are_seen(secure_parties: Any) -> None:
    scene = secure_parties(protocol="secagg", shapes={"w": (1,)})
    one = scene.masked()
    one.keys()
    one.shares()
    reply = one.clients[0].mask(one.server.mask_requests()[0])
    for bit in range(64 * len(reply.masked)):
        masked = reply.masked.copy()
        masked[bit // 64] ^= np.uint64(1 << bit % 64)
        with pytest.raises(ShareMismatchError, match="client 0"):
            one.server.take_masked(replace(reply, masked=masked))
    with pytest.raises(LayoutMismatchError):
        one.server.take_masked(replace(reply, masked=reply.masked[:-1]))


def test_stages_have_an_order_and_happen_once(secure_parties: Any) -> None:
    scene = secure_parties(protocol="secagg")
    one = scene.masked()
    with pytest.raises(ProtocolOrderError, match="drawn by rosters"):
        _ = one.server.graph
    with pytest.raises(ProtocolOrderError):
        one.server.mask_requests()
    with pytest.raises(ProtocolOrderError, match="call unmask_requests"):
        one.open()
    offer = one.server.offer()
    payload = scene.uploader(0).encode_payload(offer, **scene.arguments(0))
    keys = one.clients[0].begin(offer, payload)
    one.server.take_keys(keys)
    with pytest.raises(DuplicateClientError):
        one.server.take_keys(keys)
    with pytest.raises(ContextMismatchError, match="not asked"):
        one.server.take_keys(replace(keys, client=99))
    with pytest.raises(PublicKeyError, match="occurs twice"):
        one.server.take_keys(replace(keys, client=1))
    with pytest.raises(PublicKeyError, match="low order"):
        one.server.take_keys(replace(keys, client=1, masking_key=bytes(32)))
    with pytest.raises(TooFewClientsError):
        one.server.rosters()


def test_malformed_answers_are_refused(secure_parties: Any) -> None:
    scene = secure_parties(protocol="secagg")
    one = scene.masked()
    one.keys()
    rosters = one.server.rosters()
    reply = one.clients[0].share(rosters[0])
    with pytest.raises(WireError, match="one envelope for each neighbour"):
        one.server.take_shares(replace(reply, receivers=reply.receivers[1:]))
    one.server.take_shares(reply)
    for client in range(1, 6):
        one.server.take_shares(one.clients[client].share(rosters[client]))
    one.masks()
    unmask = one.clients[0].unmask(one.server.unmask_requests()[0])
    with pytest.raises(WireError, match="other clients than those requested"):
        one.server.take_unmask(replace(unmask, active=unmask.active[1:]))
