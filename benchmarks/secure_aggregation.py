"""What secure aggregation costs: each party, beside plain averaging, beside Flower's SecAgg+.

    python benchmarks/secure_aggregation.py [--quick] [--json [FILE]]

One process, one thread, contenders interleaved. Freed memory is kept in the process for all alike,
as fedsim's engines do. Times are processor time: nobody waits, and a shared machine's other work
does not count. Messages are passed as objects; transport is not measured. Whole rounds are those of
the local engine, with every message of it.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flower_secagg import flower_round
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from interleaved import measure, print_ratios
from records import Number, pair_ratios, quartiles, write_record
from whole_rounds import whole_rounds

from fedsim.clients.secure.additive_upload import SecureUploader
from fedsim.clients.secure.masked_upload import MaskedUpload
from fedsim.secagg.context import RoundContext, set_digest
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.messages import CombineRequest, Hello, Upload
from fedsim.secagg.payload import DecodedSum, PayloadCodec, TensorLayout
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.aggregation.aggregator import OrderedMean
from fedsim.server.secure.helper import Helper
from fedsim.server.secure.leader import Leader
from fedsim.server.secure.masked_sum import MaskedSum
from fedsim.simulation.engine import keep_freed_memory

MODEL = "model"
WEIGHT = 50


@dataclass
class Row:
    """One measured number against its goal."""

    what: str
    value: float
    unit: str
    goal: float
    at_least: bool = False
    spread: tuple[float, float] | None = None  # quartiles over turns

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def number(self) -> Number:
        """Return the row for a record."""
        claim = "whole rounds" if "round" in self.what else "processor time of parties"
        low, high = self.spread or (None, None)
        return Number(
            claim, self.what, self.value, low, high, self.unit, self.goal, least=self.at_least
        )

    def show(self) -> None:
        """Print the row."""
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        goal = f"goal {sign} {self.goal:g}"
        print(f"  {self.what:<50} {self.value:9.2f} {self.unit:<3} {goal} {verdict}")


class Bench:
    """A model of `size` float32 parameters and `clients` updates of it."""

    def __init__(self, *, size: int, clients: int, **keys: object) -> None:
        self.settings = SecureAggregationSettings.model_validate(keys)
        draw = np.random.default_rng(0)
        self.reference = {"w": draw.normal(scale=0.05, size=size).astype(np.float32)}
        self.updates = [
            {"w": self.reference["w"] + draw.normal(scale=0.01, size=size).astype(np.float32)}
            for _ in range(clients)
        ]
        self.clients = clients
        self.layout = TensorLayout.from_arrays(self.reference)
        encoder = FixedPointEncoder.from_settings(
            self.settings.encoding, num_clients=clients, weighted=True
        )
        self.codec = PayloadCodec(encoder, self.layout)

    def update(self, client: int) -> dict[str, np.ndarray]:
        """Return the update of a client."""
        return self.updates[client]

    def context(self, server_round: int = 1) -> RoundContext:
        """Return a round with a fresh nonce."""
        return RoundContext(
            run_id="bench",
            round_nonce=os.urandom(16),
            server_round=server_round,
            layout=self.layout.digest,
            params=self.settings.digest(),
            model=MODEL,
            asked=set_digest(range(self.clients)),
            plan="",
        )

    def uploader(self, client: int) -> SecureUploader:
        """Return the client side."""
        return SecureUploader(client, self.settings, self.codec)


class AdditiveBench(Bench):
    """One leader, one helper and all uploads of a round, ready to be added up again and again."""

    def __init__(self, *, size: int, clients: int) -> None:
        super().__init__(size=size, clients=clients)
        self.helper = Helper(helper=1, settings=self.settings)
        hello = Hello(run_id="bench", params=self.settings.digest(), min_clients=2)
        self.keys = {1: self.helper.hello(hello)}
        self._context = self.context()
        self.offer = self.leader().offer(self.keys)
        self.uploads = [self.upload(client) for client in range(clients)]

    def leader(self) -> Leader:
        """Return a leader that has seen nothing."""
        return Leader(
            codec=self.codec,
            context=self._context,
            helpers=[1],
            clients=range(self.clients),
            min_clients=2,
        )

    def upload(self, client: int = 0) -> Upload:
        """Encode, share, seal and tag one update."""
        return self.uploader(client).upload(
            self.offer,
            arrays=self.update(client),
            reference=self.reference,
            model_digest=MODEL,
            weight=WEIGHT,
        )

    def add_all(self) -> Leader:
        """Add all uploads."""
        leader = self.leader()
        for upload in self.uploads:
            leader.add(upload)
        return leader

    def request(self) -> CombineRequest:
        """Return what the helper is asked."""
        return self.add_all().requests()[1]

    def aggregate(self) -> DecodedSum:
        """Run leader and helper one after the other; the question is the same each time."""
        leader = self.add_all()
        for request in leader.requests().values():
            leader.take(self.helper.combine(request))
        return leader.open(reference=self.reference)

    def ordered_mean(self) -> object:
        """Plain averaging as fedsim does it."""
        mean = OrderedMean(range(self.clients), self.reference)
        for client in range(self.clients):
            mean.add(client, self.update(client), float(WEIGHT))
        return mean.result()

    def flower_records(self) -> list[RecordDict]:
        """Return the updates as Flower's replies."""
        return [
            RecordDict(
                {
                    "arrays": ArrayRecord({"w": Array(update["w"])}),
                    "metrics": MetricRecord({"num-examples": WEIGHT}),
                }
            )
            for update in self.updates
        ]


def parties(*, size: int, repetitions: int) -> list[Row]:
    """Cost of one client's update for each party."""
    bench = AdditiveBench(size=size, clients=8)
    request = bench.request()
    timings = measure(
        {
            "client: encode, share, seal, tag": bench.upload,
            "leader: 8 x check and add": bench.add_all,
            "helper: 8 x open and expand": lambda: bench.helper.combine(request),
            "encode alone": lambda: bench.codec.encode(
                bench.update(0), reference=bench.reference, weight=WEIGHT
            ),
        },
        repetitions=repetitions,
        clock=time.process_time,
    )
    for name, timing in timings.items():
        print(f"  {name:<58} {timing.median:9.3f} ms (median) {timing.best:9.3f} ms (best)")
    client, leader, helper, _ = timings.values()
    return [
        _over_turns("client, one update", client.turns, "ms", 10.0),
        _over_turns("leader, each client", [turn / 8 for turn in leader.turns], "ms", 3.0),
        _over_turns("helper, each client", [turn / 8 for turn in helper.turns], "ms", 4.0),
    ]


def against_plain(*, size: int, clients: int, repetitions: int) -> list[Row]:
    """Additive aggregation of many clients beside plain averaging."""
    bench = AdditiveBench(size=size, clients=clients)
    records = bench.flower_records()
    contenders: dict[str, Callable[[], object]] = {
        "fedsim OrderedMean": bench.ordered_mean,
        "Flower FedAvg": lambda: aggregate_arrayrecords(records, "num-examples"),
        "additive, leader + helper": bench.aggregate,
    }
    timings = measure(contenders, repetitions=repetitions, calls=1, clock=time.process_time)
    print_ratios(f"  {clients} clients x {size:,} parameters", timings, baseline="Flower FedAvg")
    secure = timings["additive, leader + helper"].turns
    return [
        _over_turns(f"additive over {name}", pair_ratios(secure, timings[name].turns), "x", 3.0)
        for name in ("fedsim OrderedMean", "Flower FedAvg")
    ]


def _over_turns(what: str, values: Sequence[float], unit: str, goal: float) -> Row:
    """Return the row of one value a turn: the median, with the quartiles."""
    low, middle, high = quartiles(values)
    return Row(what, middle, unit, goal, spread=(low, high))


def masked_round(protocol: str, *, clients: int, size: int, drops: int) -> float:
    """Return the seconds of a round of all parties; the first `drops` are lost before masking."""
    bench = Bench(size=size, clients=clients, protocol=protocol)
    server = MaskedSum(
        codec=bench.codec,
        context=bench.context(),
        settings=bench.settings,
        clients=range(clients),
    )
    parties = [MaskedUpload(client=number, settings=bench.settings) for number in range(clients)]
    start = time.process_time()
    offer = server.offer()
    for number, party in enumerate(parties):
        payload = bench.uploader(number).encode_payload(
            offer,
            arrays=bench.update(number),
            reference=bench.reference,
            model_digest=MODEL,
            weight=WEIGHT,
        )
        server.take_keys(party.begin(offer, payload))
    for number, roster in server.rosters().items():
        server.take_shares(parties[number].share(roster))
    for number, request in server.mask_requests().items():
        if number >= drops:
            server.take_masked(parties[number].mask(request))
    for number, unmask in server.unmask_requests().items():
        server.take_unmask(parties[number].unmask(unmask))
    server.open(reference=bench.reference)
    return time.process_time() - start


def against_flower(*, clients: int, size: int, drops: int, sampled: int) -> list[Row]:
    """Single-server protocols beside Flower's."""
    threshold = 2 * clients // 3 + 1
    flower = flower_round(
        clients=clients, threshold=threshold, size=size, drops=drops, sampled=sampled
    )
    seconds = {
        protocol: min(
            masked_round(protocol, clients=clients, size=size, drops=drops) for _ in range(2)
        )
        for protocol in ("secagg", "secagg_plus")
    }
    print(
        f"  Flower SecAgg+ (not secure)  {flower.scaled:9.2f} s, scaled up from "
        f"{flower.measured:.2f} s: {flower.sampled} of {clients} clients"
    )
    for protocol, value in seconds.items():
        print(f"  fedsim {protocol:<21} {value:9.2f} s, every party, {drops} drops")
    return [
        Row(f"secagg, {clients} clients x {size:,}", seconds["secagg"], "s", 5.0),
        Row("Flower over fedsim secagg", flower.scaled / seconds["secagg"], "x", 50.0, True),
    ]


def against_plain_rounds(*, quick: bool) -> list[Row]:
    """Whole rounds of a federation whose local training takes a second, beside plain ones."""
    sizes = {"width": 16, "clients": 3, "training": 0.01} if quick else _SECOND
    found = whole_rounds(**sizes, rounds=3 if quick else 6, turns=1 if quick else 5)
    print(
        f"  {sizes['clients']} clients x {found.parameters:,} parameters, {found.steps} steps: "
        f"plain {found.plain:.3f} s, additive {found.secure:.3f} s a round (processor time)"
    )
    return [_over_turns("whole round over plain, 1 s of training", found.ratios, "x", 1.10)]


_SECOND = {"width": 960, "clients": 10, "training": 1.0}


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a smoke test")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write a record; without FILE, print"
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    quick = arguments.quick
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}, one thread")
    size = 10_000 if quick else 1_000_000
    print(f"\n(a) one update of {size:,} parameters")
    rows = parties(size=size, repetitions=2 if quick else 15)
    print("\n(b) additive sharing beside plain averaging")
    rows += against_plain(size=size, clients=8 if quick else 100, repetitions=2 if quick else 5)
    print("\n(c) single-server masking beside Flower's")
    clients, drops = (9, 1) if quick else (100, 10)
    rows += against_flower(
        clients=clients, size=100 if quick else 10_000, drops=drops, sampled=1 if quick else 2
    )
    print("\n(d) whole rounds")
    rows += against_plain_rounds(quick=quick)
    print("\ngoals")
    for row in rows:
        row.show()
    content = [{**vars(row), "met": row.met} for row in rows]
    if arguments.json == "-":
        print(json.dumps({"rows": content}))
    elif arguments.json:
        numbers = [row.number() for row in rows]
        write_record(Path(arguments.json), "secure_aggregation.py", numbers, {"rows": content})


if __name__ == "__main__":
    main()
