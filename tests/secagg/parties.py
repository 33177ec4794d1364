"""All parties of secure aggregation without a network; the fixtures of tests/conftest.py."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.secure.additive_upload import SecureUploader
from fedsim.clients.secure.masked_upload import MaskedUpload
from fedsim.secagg.context import RoundContext, set_digest
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.messages import Hello, HelloReply, Upload
from fedsim.secagg.metrics import MetricGrids
from fedsim.secagg.payload import DecodedSum, PayloadCodec, TensorLayout
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.secure.helper import Helper
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum

MODEL = "digest of the model"
PLAN = "digest of the plan"


@dataclass
class Parties:
    """Settings, model, updates and parties of one round after another."""

    settings: SecureAggregationSettings
    clients: int = 6
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"w": (3, 2), "b": ()})
    seed: int = 0
    identities: dict[int, IdentityKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self.reference = {
            name: np.asarray(draw.normal(size=shape), np.float32)
            for name, shape in self.shapes.items()
        }
        self.layout = TensorLayout.from_arrays(self.reference)
        encoder = FixedPointEncoder.from_settings(
            self.settings.encoding, num_clients=self.clients, weighted=True
        )
        metrics = MetricGrids.from_bounds(self.settings.metrics, encoder)
        self.codec = PayloadCodec(encoder, self.layout, metrics)
        self.updates: dict[int, dict[str, NDArray]] = {
            client: {
                name: np.asarray(value + draw.normal(scale=0.1, size=value.shape), np.float32)
                for name, value in self.reference.items()
            }
            for client in range(self.clients)
        }
        self.weights = {client: 3 + 7 * client for client in range(self.clients)}
        self.helpers = {
            number: Helper(helper=number, settings=self.settings)
            for number in range(1, self.settings.helpers + 1)
        }
        self.keys = {number: self.hello(helper) for number, helper in self.helpers.items()}

    def hello(self, helper: Helper, run_id: str = "run", min_clients: int = 2) -> HelloReply:
        params = self.settings.digest()
        return helper.hello(Hello(run_id=run_id, params=params, min_clients=min_clients))

    def context(self, server_round: int = 1) -> RoundContext:
        return RoundContext(
            run_id="run",
            round_nonce=os.urandom(16),
            server_round=server_round,
            layout=self.layout.digest,
            params=self.settings.digest(),
            model=MODEL,
            asked=set_digest(range(self.clients)),
            plan=PLAN,
        )

    def leader(self, server_round: int = 1, **options: Any) -> Leader:
        return Leader(
            codec=self.codec,
            context=options.pop("context", None) or self.context(server_round),
            helpers=list(self.helpers),
            clients=range(self.clients),
            min_clients=self.settings.min_clients,
            **options,
        )

    def arguments(self, client: int) -> dict[str, Any]:
        return {
            "arrays": self.updates[client],
            "reference": self.reference,
            "model_digest": MODEL,
            "weight": self.weights[client],
            "metrics": {name: float(client) for name in self.settings.metrics},
            "rng": np.random.default_rng(client),
        }

    def uploader(self, client: int) -> SecureUploader:
        return SecureUploader(client, self.settings, self.codec, PLAN, self.identities.get(client))

    def upload(self, leader: Leader, client: int) -> Upload:
        return self.uploader(client).upload(leader.offer(self.keys), **self.arguments(client))

    def combine(self, leader: Leader) -> None:
        while not leader.is_complete:
            for number, request in leader.requests().items():
                leader.take(self.helpers[number].combine(request))

    def run(self, order: Iterable[int] | None = None, server_round: int = 1) -> DecodedSum:
        leader = self.leader(server_round)
        for client in range(self.clients) if order is None else order:
            leader.add(self.upload(leader, client))
        self.combine(leader)
        return leader.open(reference=self.reference)

    def plain(self, survivors: Iterable[int]) -> DecodedSum:
        """The control: the same numbers added up in clear."""
        total = np.zeros(self.codec.length, self.codec.encoder.dtype)
        survivors = list(survivors)
        for client in survivors:
            arguments = self.arguments(client)
            del arguments["model_digest"]
            total += self.codec.encode(**arguments)
        return self.codec.decode(total, num_clients=len(survivors), reference=self.reference)

    def masked(self, server_round: int = 1) -> "MaskedRound":
        return MaskedRound(self, server_round)


class MaskedRound:
    """One round of SecAgg, stage by stage, with some clients silent in each."""

    def __init__(self, parties: Parties, server_round: int) -> None:
        self.parties = parties
        self.server = MaskedSum(
            codec=parties.codec,
            context=parties.context(server_round),
            settings=parties.settings,
            clients=range(parties.clients),
        )
        self.clients = {
            client: MaskedUpload(client=client, settings=parties.settings)
            for client in range(parties.clients)
        }

    def keys(self, silent: Iterable[int] = ()) -> None:
        offer = self.server.offer()
        for client in sorted(set(self.clients) - set(silent)):
            uploader = self.parties.uploader(client)
            payload = uploader.encode_payload(offer, **self.parties.arguments(client))
            self.server.take_keys(self.clients[client].begin(offer, payload))

    def shares(self, silent: Iterable[int] = ()) -> None:
        for client, roster in self.server.rosters().items():
            if client not in silent:
                self.server.take_shares(self.clients[client].share(roster))

    def masks(self, silent: Iterable[int] = ()) -> None:
        for client, request in self.server.mask_requests().items():
            if client not in silent:
                self.server.take_masked(self.clients[client].mask(request))

    def unmask(self, silent: Iterable[int] = ()) -> None:
        for client, request in self.server.unmask_requests().items():
            if client not in silent:
                self.server.take_unmask(self.clients[client].unmask(request))

    def open(self) -> DecodedSum:
        return self.server.open(reference=self.parties.reference)

    def run(self, **silent: Iterable[int]) -> DecodedSum:
        for stage in ("keys", "shares", "masks", "unmask"):
            getattr(self, stage)(silent.get(stage, ()))
        return self.open()


def same_bits(one: DecodedSum, other: DecodedSum) -> bool:
    """Whether two aggregates are equal bit for bit."""
    arrays = list(one.arrays) == list(other.arrays) and all(
        value.dtype == other.arrays[name].dtype
        and value.shape == other.arrays[name].shape
        and value.tobytes() == other.arrays[name].tobytes()
        for name, value in one.arrays.items()
    )
    return arrays and _said(one) == _said(other)


def _said(aggregate: DecodedSum) -> dict[str, Any]:
    return {name: value for name, value in vars(aggregate).items() if name != "arrays"}


def make_parties(clients: int = 6, **settings: Any) -> Parties:
    """Return the parties of a federation.

    Args:
        clients: number of clients.
        settings: `shapes` of the tensors, `client_keys` for clients with pinned keys; the rest are
            settings of the protocol.
    """
    shapes = settings.pop("shapes", None)
    more = {} if shapes is None else {"shapes": shapes}
    if settings.pop("client_keys", False):
        keys = {client: IdentityKey.generate() for client in range(clients)}
        pins = [key.fingerprint for key in keys.values()]
        settings["keys"] = {"client_fingerprints": pins}
        more["identities"] = keys
    return Parties(SecureAggregationSettings.model_validate(settings), clients=clients, **more)
