"""What a DP-SGD step costs beside plain SGD and beside Opacus.

    python benchmarks/dp_sgd.py [--quick] [--vectorized_clients] [--model MODEL] [--json FILE]

One thread, contenders in turns, processor time; ratios are medians over neighbours in time. Four
ways to a private step: in the federation (a block of one client, by the engine that a federation
uses), through `PrivacyEngine.attach` in a loop of one's own, Opacus in its modes, when it is
installed (pip install opacus), and Opake, when it can be imported (pip install opake; its version
0.16.1 needs Python 3.12). The ghost mode of Opacus clips in two backward passes. All take a batch
of the same size in each step. `--vectorized_clients` measures blocks of several clients alone: the
clients of a round with the batches that a federation draws, K to a block, beside the bare loop of
`federation.py`.

A contender's turn is ten steps, as in an epoch of local training: the first one finds caches that
the other contenders have emptied, and in turns of three it would be a third of what is measured.
Freed memory is kept in the process for all contenders alike, as fedsim's engines do: on machines
where page faults are dear, every way that allocates per-example gradients is otherwise slowed down
by them.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from contenders.bare import BareLoop
from contenders.base import Work
from contenders.fedsim_engines import federation_of, federation_of_examples
from contenders.goals import NAMES
from interleaved import Timing, measure, print_ratios
from records import Number, machine_line, over_turns, pair_ratios, write_record
from torch import Tensor, nn

from fedsim.clients import PrivacyEngine
from fedsim.clients.training.block import block_of
from fedsim.clients.training.member import BlockMember, StreamKey
from fedsim.federation.federation import Federation
from fedsim.noise import release
from fedsim.simulation.engine import keep_freed_memory

Step = Callable[[], object]

STEPS = 10  # of a turn
PLAIN, FEDERATION, ATTACH = "plain SGD", "fedsim, in the federation", "fedsim, attach"
OPAKE = "Opake"
OPACUS_MODES = ("hooks", "functorch", "ghost")
BLOCKS: Mapping[str, tuple[int, ...]] = {
    "mlp": (1, 4, 8, 16),
    "cnn": (1, 4, 8, 16),
    "small": (8, 32, 128),
}


def mlp() -> nn.Module:
    """784-128-10, the usual MNIST network: 102k parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def small_cnn() -> nn.Module:
    """The CNN of Opacus' MNIST example: 26k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def large_cnn() -> nn.Module:
    """Two 3 x 3 convolutions and two linear layers: 422k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


MODELS = {"MLP": mlp, "small CNN": small_cnn, "large CNN": large_cnn}


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Plain SGD on the mean loss of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    index = torch.arange(len(x))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()

    return step


def attach_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """A step of a loop of one's own with the public `PrivacyEngine`.

    The loop declares a sampling rate of 1, so that every Poisson batch is all of the examples.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = PrivacyEngine(
        model,
        batch_size=len(x),
        sample_size=len(x),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        batches="poisson",
    )
    engine.attach(optimizer)
    index = torch.arange(len(x))

    def step() -> None:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(x[index]), y[index], reduction="none")
        engine.backward(losses)
        optimizer.step()

    return step


def block_turn(federation: Federation, clients: Sequence[int], steps: int) -> Step:
    """Steps of clients in one block, from the global model.

    Args:
        federation: holds the clients' data and plans, and the model.
        clients: the members, ascending.
        steps: of each member.
    """
    tasks = [federation.client_task(client) for client in clients]
    examples = [task.data.tensors() for task in tasks]
    rounds = iter(range(1, 1 << 62))  # a round's noise is never drawn twice

    def turn() -> None:
        number = next(rounds)
        members = [
            BlockMember(
                features=features,
                targets=targets,
                key=StreamKey(task.run.seed, task.client, number),
                steps=range((number - 1) * steps, number * steps),
                release=None if task.privacy is None else task.privacy.release,
            )
            for task, (features, targets) in zip(tasks, examples, strict=True)
        ]
        how = tasks[0].training
        block_of(how.shared_model, how.loss, how.gradients, how.local, members).train()

    return turn


def opacus_step(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """DP-SGD by Opacus in one of its gradient modes."""
    from opacus import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    index = torch.arange(len(x))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model,
            max_grad_norm=1.0,  # pyright: ignore[reportArgumentType]  annotated as int
        )
        ghost = DPOptimizerFastGradientClipping(inner, **options)
        loss = DPLossFastGradientClipping(wrapped, ghost, nn.CrossEntropyLoss(), "mean")

        def ghost_step() -> None:
            ghost.zero_grad()
            loss(wrapped(x[index]), y[index]).backward()
            ghost.step()

        return ghost_step
    hooked = GradSampleModule(model, force_functorch=mode == "functorch")
    optimizer = DPOptimizer(inner, **options)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(hooked(x[index]), y[index]).backward()
        optimizer.step()

    return step


def opake_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """DP-SGD by Opake: gradients of single examples by torch.func, clipped and added up."""
    from torch.func import functional_call

    opake, random = import_module("opake.dpsgd"), import_module("opake.random")

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    index = torch.arange(len(x))

    def loss(values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, dict(values), (x.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, y.unsqueeze(0))

    gradient, clip_state = opake.clipped_grad(
        loss, clipping_norm=1.0, normalize_by=float(len(x)), batch_argnums=(1, 2)
    )
    add_noise, noise_state = opake.gaussian_noise(noise_multiplier=1.0, key=random.key(0))

    def step() -> None:
        nonlocal clip_state, noise_state
        clipped, clip_state = gradient(values, x[index], y[index], state=clip_state)
        noisy, noise_state = add_noise(clipped, noise_state)
        for name, value in values.items():
            value.add_(noisy.pytree[name], alpha=-0.01)

    return step


def turns_of(step: Step, steps: int) -> Step:
    """Return a turn of several steps."""

    def turn() -> None:
        for _ in range(steps):
            step()

    return turn


def contenders(
    make_model: Callable[[], nn.Module], x: Tensor, y: Tensor, folder: Path, steps: int
) -> dict[str, Step]:
    """Return a turn of every contender that this machine has.

    Args:
        make_model: builds a model with fresh values.
        x: examples of a batch (n, 1, 28, 28).
        y: their classes (n,).
        folder: an empty folder for the files of a federation.
        steps: of a turn.
    """
    federation = federation_of_examples(make_model(), x, y, folder)
    found = {
        PLAIN: turns_of(plain_step(make_model(), x, y), steps),
        FEDERATION: block_turn(federation, [0], steps),
        ATTACH: turns_of(attach_step(make_model(), x, y), steps),
    }
    if _has("Opacus", "opacus"):
        for mode in OPACUS_MODES:
            found[f"Opacus, {mode}"] = turns_of(opacus_step(mode, make_model(), x, y), steps)
    if _has(OPAKE, "opake.dpsgd"):
        found[OPAKE] = turns_of(opake_step(make_model(), x, y), steps)
    return found


def _has(name: str, module: str) -> bool:
    """Whether a contender can be imported; says so where it cannot."""
    try:
        import_module(module)
    except (ImportError, TypeError) as error:  # TypeError: Opake 0.16.1 on Python 3.11
        print(f"{name} is left out: {error}")
        return False
    return True


def numbers_of(model: str, batch: int, timings: Mapping[str, Timing]) -> list[Number]:
    """Return every ratio of a case, with the goals that it has.

    Args:
        model: its name in `MODELS`.
        batch: examples of a batch.
        timings: by contender.
    """
    case = f"{model}, batch {batch}"
    goals = _goals(model, batch)

    def ratio(claim: str, one: str, other: str, goal: float | None, *, least: bool) -> Number:
        pairs = pair_ratios(timings[one].turns, timings[other].turns)
        return over_turns(claim, case, pairs, goal=goal, least=least)

    found = [
        ratio(
            "private step in the federation / plain SGD", FEDERATION, PLAIN, goals[0], least=False
        ),
        ratio(
            "private step through PrivacyEngine.attach / plain SGD",
            ATTACH,
            PLAIN,
            goals[1],
            least=False,
        ),
    ]
    modes = [name for name in timings if name.startswith("Opacus")]
    others = [*modes, *(name for name in timings if name == OPAKE)]
    found += [ratio(f"{name} / plain SGD", name, PLAIN, None, least=False) for name in others]
    if modes:
        best = min(modes, key=lambda name: timings[name].median)
        claim = "best mode of Opacus / PrivacyEngine.attach"
        found.append(ratio(claim, best, ATTACH, goals[2], least=True))
    return found


def _goals(model: str, batch: int) -> tuple[float | None, float | None, float | None]:
    """Return the goals in the federation, through `attach` and of Opacus over `attach`."""
    if batch not in (64, 256):
        return None, None, None
    if model != "MLP":
        return 1.1, 1.0, 1.8
    return (1.4, 1.8, 2.0) if batch == 64 else (1.3, 1.5, 2.0)


def measure_steps(names: Sequence[str], *, quick: bool) -> list[Number]:
    """Measure a private step of each model at each batch size.

    Args:
        names: of the models.
        quick: few repetitions of one step each.
    """
    found: list[Number] = []
    for name in names:
        for batch in (16,) if quick else (16, 64, 256):
            torch.manual_seed(0)
            x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
            with TemporaryDirectory() as folder:
                timings = measure(
                    contenders(MODELS[name], x, y, Path(folder), 1 if quick else STEPS),
                    repetitions=2 if quick else 8 if batch > 64 else 20,
                    calls=1,
                    clock=time.process_time,
                )
            print_ratios(f"{name}, batch {batch} (a turn)", timings, baseline=PLAIN)
            found += numbers_of(name, batch, timings)
    return found


def measure_blocks(*, quick: bool) -> list[Number]:
    """Measure the clients of a round in blocks of K, beside the bare loop over them.

    Args:
        quick: few repetitions with the smallest two blocks.
    """
    found: list[Number] = []
    for model, sizes in BLOCKS.items():
        blocks = sizes[:2] if quick else sizes
        work = Work(model, max(blocks), private=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            federation, bare = federation_of(work, folder, {}), BareLoop()
            bare.prepare(work)
            turns: dict[str, Step] = {"bare loop": bare.round}
            for size in blocks:
                turns[f"blocks of {size}"] = _in_blocks(federation, work, size)
            timings = measure(
                turns, repetitions=2 if quick else 15, calls=1, clock=time.process_time
            )
        title = f"{NAMES[model]}, {work.clients} private clients, batch {work.batch}"
        print_ratios(title, timings, baseline="bare loop")
        for size in blocks:
            pairs = pair_ratios(timings[f"blocks of {size}"].turns, timings["bare loop"].turns)
            case = f"{NAMES[model]}, K = {size}"
            found.append(over_turns("private clients, K in one block / bare loop", case, pairs))
    return found


def _in_blocks(federation: Federation, work: Work, size: int) -> Step:
    """Return a turn that trains all clients, so many in one block."""
    starts = range(0, work.clients, size)
    parts = [
        block_turn(federation, range(start, min(start + size, work.clients)), work.steps)
        for start in starts
    ]

    def turn() -> None:
        for part in parts:
            part()

    return turn


def main() -> None:
    """Measure every model at every batch size, and blocks of clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, for a smoke test")
    parser.add_argument("--model", choices=sorted(MODELS), help="one model only, without blocks")
    parser.add_argument("--vectorized_clients", action="store_true", help="blocks of clients only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every ratio")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{machine_line()}, one thread")
    names = [arguments.model] if arguments.model else list(MODELS)
    with patch.object(release, "LEAST_VALUES", 1):  # as in a long run
        found = measure_steps([] if arguments.vectorized_clients else names, quick=arguments.quick)
        if not arguments.model:
            found += measure_blocks(quick=arguments.quick)
    for number in found:
        print(number.line())
    if arguments.json:
        write_record(arguments.json, "dp_sgd.py", found)


if __name__ == "__main__":
    main()
