"""What each speed trick of the engine buys: a turn without it over a turn with it.

    python benchmarks/tricks.py [--quick] [--json FILE]

One thread, with and without a trick in turns, processor time. A trick is taken out by a patch that
leaves the results as they are up to rounding. benchmarks/README.md has the ratios: one that
buys nothing on any processor goes.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from contenders.base import Work
from contenders.fedsim_engines import federation_of
from contenders.goals import NAMES
from dp_sgd import block_turn
from interleaved import measure, print_ratios
from records import Number, machine_line, over_turns, pair_ratios, write_record

from fedsim.clients.gradients import rule_gradients
from fedsim.clients.gradients.layers import base
from fedsim.clients.gradients.layers.convolution import ConvolutionUse
from fedsim.clients.gradients.rule_gradients import ModuleSequence
from fedsim.clients.mechanisms.dp_sgd import batch_sums
from fedsim.core import streams
from fedsim.noise import release
from fedsim.noise.sources import SeededNoise
from fedsim.simulation.engine import keep_freed_memory

Turn = Callable[[], object]
Patch = AbstractContextManager[object]
VALUES = 101_770  # of the MLP: draws of one release


@dataclass(frozen=True)
class Trick:
    """A trick, and how the engine is without it.

    Attributes:
        name: row of the table.
        without: patches that take it out.
        models: of a client's step that it is measured in.
        base: patches of both sides, where another trick would hide it.
    """

    name: str
    without: Callable[[], Patch]
    models: tuple[str, ...]
    base: Callable[[], Patch] | None = None


def _no_sequences() -> Patch:
    return patch.object(ModuleSequence, "is_usable", False)


def _no_known_gradients() -> Patch:
    return patch.object(rule_gradients, "known_gradient", lambda loss: None)


def _channels_first() -> Patch:
    forward = ConvolutionUse.forward
    return patch.object(ConvolutionUse, "forward", lambda use, x: forward(use, x).contiguous())


def _products() -> Patch:
    make = ConvolutionUse.__init__

    def make_by_products(use: ConvolutionUse, *args: object) -> None:
        make(use, *args)  # pyright: ignore[reportArgumentType]
        use._by_torch = False

    return patch.object(ConvolutionUse, "__init__", make_by_products)


def _no_numba() -> Patch:
    return patch.object(release, "kernel", lambda: None)


def _float64_norms() -> Patch:
    return patch.object(base, "_norms", lambda values, size: base._double_norms(values))


def _float64_sums() -> Patch:
    return patch.object(batch_sums, "products_are_exact", lambda device: False)


TRICKS = (
    Trick("plain sequences run by hand, without autograd", _no_sequences, ("small", "mlp", "cnn")),
    Trick(
        "cross-entropy knows its own gradient",
        _no_known_gradients,
        ("small", "mlp"),
        base=_no_sequences,
    ),
    Trick("images with channels last, for pooling", _channels_first, ("cnn", "builtin-cnn")),
    Trick("convolutions by torch, client by client", _products, ("cnn", "builtin-cnn")),
    Trick("the release compiled by numba", _no_numba, ("mlp",)),
    Trick("sums in float32, not float64", _float64_sums, ("small", "mlp", "cnn")),
    Trick("norms in float32, not float64", _float64_norms, ("small", "mlp", "cnn")),
)


def measure_tricks(*, quick: bool) -> list[Number]:
    """Measure the private steps of one client with and without each trick.

    Args:
        quick: few repetitions of the first trick.
    """
    found = []
    for trick in TRICKS[:1] if quick else TRICKS:
        for model in trick.models[:1] if quick else trick.models:
            work = Work(model, 1, private=True)
            with TemporaryDirectory() as folder, ExitStack() as stack:
                stack.enter_context(patch.object(release, "LEAST_VALUES", 1))  # as in a long run
                if trick.base is not None:
                    stack.enter_context(trick.base())
                federation = federation_of(work, Path(folder), {}, vectorized_clients="off")
                turn = block_turn(federation, [0], 10)

                def taken_out(turn: Turn = turn, trick: Trick = trick) -> None:
                    with trick.without():
                        turn()

                case = f"{NAMES[model]}, batch {work.batch}"
                found.append(_ratio(trick.name, case, turn, taken_out, quick=quick))
    return found


def measure_noise(*, quick: bool) -> list[Number]:
    """Measure the choices of seeded noise.

    Args:
        quick: few repetitions.
    """
    gcm = streams._gcm_is_faster()
    source, values = SeededNoise(bytes(32)), torch.empty(VALUES, dtype=torch.float64)
    generator, floats = torch.Generator().manual_seed(0), torch.empty(VALUES)

    def draw() -> None:
        source.fill_(values)

    def other_mode() -> None:
        with patch.object(streams, "_gcm_is_faster", lambda: not gcm):
            SeededNoise(bytes(32)).fill_(values)

    def by_torch() -> None:
        floats.normal_(std=2.0**24, generator=generator)
        values.copy_(floats).round_()

    others: Mapping[str, Turn] = {
        f"{'AES-GCM' if gcm else 'AES-CTR'} for the keystream, the faster one here": other_mode,
        "integers of a proven law, not normals by torch": by_torch,
    }
    case = f"{VALUES:,} values"
    return [_ratio(name, case, draw, other, quick=quick) for name, other in others.items()]


def _ratio(name: str, case: str, with_it: Turn, without: Turn, *, quick: bool) -> Number:
    timings = measure(
        {"with": with_it, "without": without},
        repetitions=2 if quick else 25,
        calls=1,
        clock=time.process_time,
    )
    print_ratios(f"{name}: {case}", timings, baseline="with")
    return over_turns(
        "time of a step without a trick / with it",
        f"{name}, {case}",
        pair_ratios(timings["without"].turns, timings["with"].turns),
    )


def main() -> None:
    """Measure every trick."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, for a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every ratio")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{machine_line()}, one thread")
    found = measure_tricks(quick=arguments.quick) + measure_noise(quick=arguments.quick)
    for number in found:
        print(number.line())
    if arguments.json:
        write_record(arguments.json, "tricks.py", found)


if __name__ == "__main__":
    main()
