"""`min_clients` holds against a server that asks for less, and nobody claims more than that."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.runs.privacy_summary import secure_facts
from fedsim.secagg.additive import expand_into, seed_info
from fedsim.secagg.errors import TooFewClientsError, WireError
from fedsim.secagg.hpke import seal
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.masks import SeedExpander, new_seed
from fedsim.secagg.messages import CombineReply, UnmaskRequest
from fedsim.statement.facts import Facts
from fedsim.statement.result import secure_aggregation

ROOT = Path(__file__).parents[2]


def test_a_client_unmasks_no_sum_below_its_own_minimum(secure_parties: Any) -> None:
    """A server that claims dropouts down to the threshold, which is below the minimum."""
    scene = secure_parties(protocol={"name": "secagg", "threshold": 4}, min_clients=5)
    one = scene.masked()
    one.keys()
    one.shares()
    one.masks()
    honest = one.server.unmask_requests()[0]
    lie = UnmaskRequest(active=(0, 1, 2, 3), dead=(4, 5))
    with pytest.raises(TooFewClientsError, match="4 parties, below the client's own min_clients 5"):
        one.clients[0].unmask(lie)
    assert one.clients[0].unmask(honest).active == (0, 1, 2, 3, 4, 5)


def test_the_count_of_a_client_is_of_the_parties_it_masked_with(secure_parties: Any) -> None:
    """In a sparse graph the request lists neighbours only; the client counts itself as well."""
    protocol = {"name": "secagg_plus", "corrupt_fraction": 0.05}
    scene = secure_parties(clients=60, protocol=protocol, min_clients=18)
    one = scene.masked()
    for stage in (one.keys, one.shares, one.masks):
        stage()
    assert not one.server.graph.complete
    client, request = 7, one.server.unmask_requests()[7]
    threshold = one.server.graph.threshold
    assert threshold < 16 < len(request.active)
    few = replace(request, active=request.active[:16], dead=request.active[16:])
    with pytest.raises(TooFewClientsError, match="17 parties"):
        one.clients[client].unmask(few)
    enough = replace(request, active=request.active[:17], dead=request.active[17:])
    assert one.clients[client].unmask(enough).active == request.active[:17]


def test_the_leader_lowers_no_helpers_minimum(secure_parties: Any) -> None:
    scene = secure_parties(min_clients=4)
    leader = scene.leader()
    for client in range(6):
        leader.add(scene.upload(leader, client))
    request = leader.requests()[1]
    few = replace(request, clients=request.clients[:3], envelopes=request.envelopes[:3])
    with pytest.raises(TooFewClientsError, match="no sum of fewer than 4"):
        scene.helpers[1].combine(few)


def _forge(scene: Any) -> tuple[Any, CombineReply, dict[int, bytes], Any]:
    """A leader keeps client 0, and makes up clients 1 and 2 with seeds that it knows."""
    leader = scene.leader()
    real = scene.upload(leader, 0)
    leader.add(real)
    for client in (1, 2):
        leader.add(scene.upload(leader, client))
    genuine = leader.requests()[1]
    context, key = leader.offer(scene.keys), scene.keys[1].public_key
    forged = {client: new_seed() for client in (1, 2)}
    infos = {client: seed_info(context, client, 1) for client in (0, 1, 2)}
    envelopes = [seal(seed, key, info=infos[client]) for client, seed in forged.items()]
    keys = {client: IdentityKey.generate() for client in forged}
    signatures = [
        keys[client].sign_envelope(envelope, info=infos[client])
        for client, envelope in zip(forged, envelopes, strict=True)
    ]
    request = replace(genuine, envelopes=(genuine.envelopes[0], *envelopes))
    if genuine.identities:
        request = replace(
            request,
            identities=(genuine.identities[0], *(key.public for key in keys.values())),
            signatures=(genuine.signatures[0], *signatures),
        )
    return real, scene.helpers[1].combine(request), forged, (leader, infos, request)


def test_forged_clients_are_told_and_not_hidden(secure_parties: Any) -> None:
    """What the threat model says: a leader that makes clients up reads the real one's update."""
    scene = secure_parties(min_clients=3)
    real, reply, forged, (leader, infos, _) = _forge(scene)
    assert reply.released, "a helper cannot tell"
    known = np.zeros_like(reply.total)
    expander = SeedExpander(scene.settings.prg)
    expand_into(known, list(forged.values()), [infos[1], infos[2]], expander)
    read = real.share + (reply.total - known)
    np.testing.assert_array_equal(
        read, scene.uploader(0).encode_payload(leader.offer(scene.keys), **scene.arguments(0))
    )
    assert _secure_facts(scene)["trust"]["forged_clients"] == "undetected"
    page = (ROOT / "docs" / "explain" / "secure_aggregation.md").read_text()
    assert "**Clients that the server makes up.**" in page
    assert "enforced by server, helpers and clients" not in page


def test_a_helper_that_knows_the_clients_counts_no_forged_one(secure_parties: Any) -> None:
    """With pinned keys of clients: neither other keys nor genuine signatures of other bytes."""
    scene = secure_parties(min_clients=3, client_keys=True)
    _, reply, _, (_, _, request) = _forge(scene)
    assert (reply.released, reply.rejected) == (False, (1, 2))
    helper = scene.helpers[1]
    genuine = scene.leader()
    for client in (0, 1, 2):
        genuine.add(scene.upload(genuine, client))
    honest = genuine.requests()[1]
    stolen = replace(request, identities=honest.identities, signatures=honest.signatures)
    assert helper.combine(stolen).rejected == (0, 1, 2), "signatures of another attempt"
    with pytest.raises(WireError, match="each client needs both"):
        helper.combine(replace(honest, identities=(), signatures=()))
    assert helper.combine(honest).released
    assert _secure_facts(scene)["trust"]["forged_clients"] == "refused"


def test_a_client_without_its_pinned_key_is_left_out(secure_parties: Any) -> None:
    scene = secure_parties(min_clients=3, client_keys=True)
    scene.identities[5] = IdentityKey.generate()
    del scene.identities[4]
    aggregate = scene.leader()
    for client in range(6):
        aggregate.add(scene.upload(aggregate, client))
    scene.combine(aggregate)
    assert aggregate.clients == [0, 1, 2, 3]
    assert set(aggregate.rejected) == {4, 5}


def test_the_statement_of_a_run_says_so(secure_parties: Any) -> None:
    scene = secure_parties()
    text = secure_aggregation(_facts(_secure_facts(scene))).text
    assert "a server that invents clients can open a sum with a single real client" in text


def _secure_facts(scene: Any) -> dict[str, Any]:
    """Return what a run of the scene's six clients records on secure aggregation."""
    federation: Any = SimpleNamespace(
        secure=scene,
        plan=SimpleNamespace(participation=SimpleNamespace(round_sizes=(6, 6)), digest=""),
        experiment=SimpleNamespace(privacy=None),
    )
    facts = secure_facts(federation, (), one_operator=True)
    assert facts is not None
    return facts


def _facts(secure: dict[str, Any]) -> Facts:
    return Facts(clients=(), secure_aggregation=secure)
