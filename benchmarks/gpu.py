"""Client-rounds per second on a GPU, beside a bare loop there and beside the CPU.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --clients 1000 --models mlp --turns 3

The rounds of `federation.py` (server, ledger and accounts included), with its contenders: fedsim
and the bare loop on cuda and on the CPU, each in a process of its own, in turns. On the CPU a part
of the clients does the work, and the rest is scaled, as for the bare loop on cuda. 10,000 clients
of the MLP hold 9.4 GB of examples, on the GPU and up to four times in memory: who does not fit is
left out, and said so. Where torch finds no GPU, the CPU is measured alone, and the rest is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from contenders.base import Work
from contenders.goals import NAMES, turn_ratios
from federation import Row, measure, parser_of
from records import Number, machine_line, over_turns, write_record

KEYS = ("bare-cuda", "fedsim-cuda", "bare", "fedsim")


def gpu() -> str | None:
    """Return the GPU's name; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def numbers(rows: Sequence[Row]) -> list[Number]:
    """Return client-rounds per second of each contender, and fedsim's speed over the others'.

    Args:
        rows: of all cases.
    """
    cases: dict[tuple[str, int, bool], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.model, row.clients, row.private), {})[row.contender] = row
    return [
        number
        for (model, clients, private), by in cases.items()
        for number in _case(f"{NAMES[model]}, {clients:,} clients", private, by)
    ]


def _case(case: str, private: bool, by: Mapping[str, Row]) -> list[Number]:
    privacy = "private" if private else "not private"
    rate, speed = f"{privacy}: client-rounds per second", f"{privacy}: speed of fedsim-cuda"
    found = [
        over_turns(rate, f"{key}, {case}", [1 / wall for wall in row.wall_turns], unit="/s")
        for key, row in by.items()
    ]
    for other in ("bare-cuda", "fedsim"):
        if other in by and "fedsim-cuda" in by:
            ratios = turn_ratios(asdict(by[other]), asdict(by["fedsim-cuda"]), "wall")
            found.append(over_turns(speed, f"over {other}, {case}", ratios))
    return found


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--models", nargs="+", choices=["mlp", "cnn"], default=["mlp", "cnn"])
    options = parser.parse_args()
    if options.quick:
        options.clients, options.models, options.turns = [3], ["mlp"], 1
    name = gpu()
    print(machine_line() + f", GPU {name or 'none: cuda is left out'}")
    rows: list[Row] = []
    for model in options.models:
        for clients in options.clients:
            for private in (mode == "private" for mode in options.modes):
                print(f"{model}, {clients} clients, {'private' if private else 'not private'}")
                base = "bare-cuda" if name else "bare"
                work = Work(model, clients, private)
                found = measure(work, KEYS, options.turns, options.seconds, base=base)
                rows += found
                for row in found:
                    print(row.line(), flush=True)
                if options.json:
                    write_record(
                        options.json,
                        "gpu.py",
                        numbers(rows),
                        {"rows": [asdict(row) for row in rows]},
                        extra_machine={"gpu": name or ""},
                    )
    for number in numbers(rows):
        print(number.line())


if __name__ == "__main__":
    main()
