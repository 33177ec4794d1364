"""The parts of a federation whose cost grows with the number of clients, each by itself.

    python benchmarks/scale_parts.py --json out.json

Each part does the work of a whole federation, or of one round of 1,000 clients in it, for each
number of clients. Processor time of one thread, medians over repetitions; memory is what Python and
numpy hold of the result. docs/explain/scale.md shows the table that `--table RECORD` prints.
"""

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from records import Number, machine_line, write_record

from fedsim.accountant import Gaussian, PoissonSampled, PrivacyLedger
from fedsim.accountant.ledger.journal import GENESIS, Charge, FileJournal
from fedsim.accountant.trust import NoiseNeed, NoiseShares
from fedsim.algorithms.state import ServerState
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.plan import PlanRequest, PrivacyPlan
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.federation.schedule import map_shared
from fedsim.protocol.arrays import to_arrays
from fedsim.protocol.client_spend import ClientSpend
from fedsim.runs.directory import privacy_text
from fedsim.runs.records import RunCheckpoint
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.participation.participation import Participation
from fedsim.simulation.engine import FIRST_NODE, NodeContexts

SIZES = (10_000, 100_000, 1_000_000)
PARTICIPANTS, KINDS = 1000, 100
ROUNDS = 20  # of the schedule

Work = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: as in the table.
        prepare: returns the work for some clients, whose time is measured.
        unit: what one result is about: all clients of a federation, or a round.
        is_kept: whether the result is memory of each client.
    """

    name: str
    prepare: Callable[[int], Work]
    unit: str = "a federation"
    is_kept: bool = False


def participation_of(clients: int) -> Participation:
    """Return a schedule of 1,000 clients a round."""
    return Participation(0, clients, PARTICIPANTS, ROUNDS)


def draw(clients: int) -> Work:
    """Draw the participants of one round."""
    participation = participation_of(clients)
    return lambda: participation.in_round(1)


def schedule(clients: int) -> Work:
    """Draw all rounds, and count those of each client."""
    return lambda: participation_of(clients).planned_rounds()


def plans(clients: int) -> Work:
    """Calibrate the noise of clients of 100 sizes."""
    local, calls = LocalSettings(steps=4, batch_size=8), count(1)
    sizes = [8 + client % KINDS for client in range(clients)]

    def plan(own: PrivacySettings, size: int) -> PrivacyPlan:
        return plan_privacy(PlanRequest(own, local, examples=size, planned_rounds=5))

    def work() -> object:
        delta = 1e-3 / (
            1 + next(calls) / 1000 + clients / 1e9
        )  # another one each time: nothing is remembered
        privacy = PrivacySettings(target_epsilon=8.0, delta=delta, max_grad_norm=0.5)
        return [*map_shared(plan, [privacy] * clients, sizes)]

    return work


def spends(clients: int) -> list[ClientSpend]:
    """Return what clients of 100 kinds have spent."""
    found = []
    for client in range(clients):
        event = PoissonSampled(0.05 + 0.005 * (client % KINDS), Gaussian(1.0))
        found.append(
            ClientSpend(
                client=client,
                examples=16,
                delta=1e-3,
                noise_multiplier=1.0,
                sampling_rate=event.sampling_rate,
                target_epsilon=8.0,
                rounds=1,
                steps=4,
                round_steps=4,
                ledger=PrivacyLedger().record(event, 4),
                head=f"{client:064x}",
            )
        )
    return found


def all_accounts(clients: int) -> Work:
    """Take the spend of every client, and compute ε of the federation."""
    own = spends(clients)

    def work() -> object:
        book = ClientLedgers("pld")
        for spend in own:
            book.record(spend)
        book.epsilon_max()
        return book

    return work


def account_of_a_round(clients: int) -> Work:
    """Take the spend of 1,000 clients among all, and compute ε of the federation."""
    own, book = spends(clients), ClientLedgers("pld")
    for spend in own:
        book.record(spend)
    book.epsilon_max()

    def work() -> object:
        for spend in own[:PARTICIPANTS]:
            book.record(spend)
        return book.epsilon_max()

    return work


def contexts(clients: int) -> Work:
    """Make the context of every client."""

    def work() -> object:
        made = NodeContexts(range(clients), num_nodes=clients)
        return made, [made[FIRST_NODE + client] for client in range(clients)]

    return work


def charges(clients: int) -> list[Charge]:
    """Return the first charge of each client."""
    ledger = PrivacyLedger().record(PoissonSampled(0.1, Gaussian(1.0)), 4)
    return [Charge(client, 1, "0" * 64, 4, ledger, GENESIS) for client in range(clients)]


def ledger_of_a_round(clients: int) -> Work:
    """Charge 1,000 clients in a ledger that has a record of every other one."""
    folder = tempfile.TemporaryDirectory()
    journal, own = FileJournal(Path(folder.name) / "ledger.jsonl"), charges(clients)
    journal.append_all(own)
    heads = [charge.hash for charge in own]

    def work() -> object:
        _ = folder  # lives as long as the work
        new = [
            Charge(client, 2, "0" * 64, 4, own[client].ledger, heads[client])
            for client in range(PARTICIPANTS)
        ]
        journal.append_all(new)
        heads[:PARTICIPANTS] = [charge.hash for charge in new]
        return None

    return work


def read_ledger(clients: int) -> Work:
    """Read and check a ledger with one record of each client."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "ledger.jsonl"
    path.write_text("".join(charge.to_line() for charge in charges(clients)))

    def work() -> object:
        _ = folder
        journal = FileJournal(path)
        journal.clients()
        return journal

    return work


def checkpoint(clients: int) -> Work:
    """Write the checkpoint of a round after which every client is charged."""
    heads = {client: f"{client:064x}" for client in range(clients)}
    state = ServerState(to_arrays({"w": np.zeros(1000, np.float32)}), round_number=1)
    return lambda: RunCheckpoint(state, heads, "0" * 64).to_bytes()


def noise_shares(clients: int) -> Work:
    """Share the noise of a sum among clients of 100 kinds, with distributed trust."""
    needs = [NoiseNeed(1.0 + client % KINDS, 1.0, 0.0) for client in range(clients)]
    return lambda: NoiseShares.meeting(needs, min_clients=PARTICIPANTS, colluding_clients=1)


def privacy_file(clients: int) -> Work:
    """Write the rows of privacy.json."""
    rows = [
        {
            **{"client": one.client, "against": "server", "examples": one.examples},
            **{"delta": one.delta, "epsilon": 1.0, "epsilon_rdp": 1.1, "target_epsilon": 8.0},
            **{"noise_multiplier": 1.0, "sampling_rate": one.sampling_rate, "rounds": 1},
            **{"steps": 4, "ledger": one.ledger.to_list(), "ledger_head": one.head},
        }
        for one in spends(clients)
    ]
    return lambda: privacy_text({"schema": 1, "clients": rows})


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        part.name: part
        for part in (
            Part("draw of the clients of a round", draw, "a round"),
            Part(f"schedule of {ROUNDS} rounds", schedule),
            Part(f"plans of {KINDS} kinds", plans),
            Part(f"noise shares, {KINDS} kinds", noise_shares),
            Part(f"accounts of all clients, {KINDS} kinds", all_accounts, is_kept=True),
            Part("accounts after a round", account_of_a_round, "a round"),
            Part("contexts of all clients", contexts, is_kept=True),
            Part("charges of a round on disk", ledger_of_a_round, "a round"),
            Part("ledger read, a record of each client", read_ledger, is_kept=True),
            Part("checkpoint with all heads", checkpoint, "a round"),
            Part("text of privacy.json", privacy_file),
        )
    }
)


@dataclass(frozen=True)
class Figures:
    """What a part took.

    Attributes:
        seconds: processor time.
        megabytes: memory of the result; None where it was not measured.
    """

    seconds: float
    megabytes: float | None


def measure(part: Part, clients: int, repetitions: int) -> Figures:
    """Return the figures of a part for some clients.

    Args:
        part: what is done.
        clients: number of clients.
        repetitions: timed repetitions; memory is measured in one more.
    """
    work = part.prepare(clients)
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    megabytes = None
    if clients <= SIZES[1] and part.is_kept:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        result = work()
        megabytes = (tracemalloc.get_traced_memory()[0] - before) / 1e6
        tracemalloc.stop()
        del result
    return Figures(statistics.median(times), megabytes)


def rows_of(record: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each part of a record: seconds for each size, bytes of a client."""
    for name, sizes in record["parts"].items():
        cells = [_seconds(found["seconds"]) for found in sizes.values()]
        known = [
            1e6 * found["megabytes"] / int(size)
            for size, found in sizes.items()
            if found["megabytes"] is not None and PARTS[name].is_kept
        ]
        yield [name, *cells, f"{known[-1]:,.0f}" if known else "–"]


def table_of(record: Mapping[str, Any]) -> str:
    """Return a record as a table: a row for each part, a column for each number of clients."""
    sizes = [int(size) for size in next(iter(record["parts"].values()))]
    head = ["part", *(f"{size:,} clients" for size in sizes), "bytes a client"]
    lines = [head, ["---"] * len(head), *rows_of(record)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{1e3 * value:.2g} ms"


def numbers_of(parts: Mapping[str, Mapping[int, Figures]]) -> Sequence[Number]:
    """Return the growth of each part's time between the two largest sizes, for each client.

    Args:
        parts: figures by part and number of clients.
    """
    found = []
    for name, sizes in parts.items():
        *_, small, large = sorted(sizes)
        ratio = sizes[large].seconds / sizes[small].seconds
        per_client = PARTS[name].unit != "a round"
        value = ratio * small / large if per_client else ratio
        claim = "time of a client" if per_client else "time of a round of 1,000 clients"
        case = f"{name}, {large:,} over {small:,} clients"
        found.append(Number(f"parts of a federation: {claim}", case, value))
    return found


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and machine")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print a record's figures")
    options = parser.parse_args()
    if options.table:
        print(table_of(json.loads(options.table.read_text())))
        return
    if options.quick:
        options.clients, options.repetitions = [PARTICIPANTS, 2 * PARTICIPANTS], 1
    print(machine_line())
    parts = {
        name: {size: measure(PARTS[name], size, options.repetitions) for size in options.clients}
        for name in options.parts
    }
    content = {
        name: {str(size): vars(found) for size, found in sizes.items()}
        for name, sizes in parts.items()
    }
    print(table_of({"parts": content}))
    if options.json:
        write_record(options.json, "scale_parts.py", numbers_of(parts), {"parts": content})


if __name__ == "__main__":
    main()
