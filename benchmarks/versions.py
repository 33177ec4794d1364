"""Rounds of federations in two checkouts of fedsim, before and after a change, in turns.

    python benchmarks/versions.py ../fedsim-before . --models mlp cnn --clients 50 --json out.json

Each checkout runs its own fedsim and its own contender of `benchmarks/contenders`, in a process of
its own with PYTHONPATH set to the checkout; the libraries are those of this interpreter. The two
take turns, round by round, so that a busy machine disturbs both alike. Ratios are after / before:
below 1 is a gain. A case that one checkout does not know is left out, and said so.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from math import ceil
from pathlib import Path

from contenders import CONTENDERS
from contenders.base import SHAPES, Work
from contenders.goals import NAMES
from contenders.stage import LeftOutError, Stage
from federation import LEAST_TURN_SECONDS, parser_of
from records import Number, machine_line, over_turns, pair_ratios, write_record

Turn = Mapping[str, float]


def measure(work: Work, key: str, checkouts: tuple[Path, Path], turns: int) -> list[list[Turn]]:
    """Return the turns of both checkouts; none where one of them cannot take part.

    Args:
        work: what a round is.
        key: the contender in `CONTENDERS`.
        checkouts: roots of the checkouts before and after.
        turns: timed turns of each.
    """
    with ExitStack() as stack:
        try:
            stages = [stack.enter_context(Stage(key, work, checkout)) for checkout in checkouts]
            for stage in stages:
                stage.wait()
        except (LeftOutError, RuntimeError) as reason:
            print(f"  {key} is left out: {reason}")
            return [[], []]
        took = [stage.rounds(1)["wall"] for stage in stages]
        took = [stage.rounds(1)["wall"] for stage in stages]  # the first round warms up
        rounds = max(1, ceil(LEAST_TURN_SECONDS / min(took)))
        seen: list[list[Turn]] = [[], []]
        for _ in range(turns):
            for stage, own in zip(stages, seen, strict=True):
                own.append(stage.rounds(rounds))
    return seen


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("before", type=Path, help="root of the checkout before the change")
    parser.add_argument("after", type=Path, help="root of the checkout after it")
    parser.add_argument("--clients", type=int, nargs="+", default=[50])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["mlp", "cnn"])
    names = [key for key, entry in CONTENDERS.items() if key.startswith("fedsim")]
    parser.add_argument("--contenders", nargs="+", choices=names, default=["fedsim"])
    options = parser.parse_args()
    if options.quick:
        options.clients, options.models, options.turns = [3], ["small"], 1
    print(machine_line())
    numbers: list[Number] = []
    details: list[dict[str, object]] = []
    cases = [
        (Work(model, clients, mode == "private"), key)
        for model in options.models
        for clients in options.clients
        for mode in options.modes
        for key in options.contenders
    ]
    for work, key in cases:
        case = f"{NAMES[work.model]}, {work.clients:,} clients"
        privacy = "private" if work.private else "not private"
        before, after = measure(work, key, (options.before, options.after), options.turns)
        for clock in ("wall", "processor") if before else ():
            pairs = [[turn[clock] for turn in turns] for turns in (after, before)]
            cell = f"{key}, {case}, {clock} time"
            numbers.append(over_turns(f"{privacy}: after / before", cell, pair_ratios(*pairs)))
            print(numbers[-1].line(), flush=True)
        details.append({"case": f"{privacy}: {key}, {case}", "before": before, "after": after})
    if options.json:
        write_record(options.json, "versions.py", numbers, {"turns": details})


if __name__ == "__main__":
    main()
