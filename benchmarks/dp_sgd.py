"""What a DP-SGD step costs beside plain SGD and beside Opacus.

    python benchmarks/dp_sgd.py [--quick | --cohort]

One thread, contenders interleaved, processor time, ratios to plain SGD in the same run. Opacus is
measured when it is installed (pip install opacus); its ghost mode clips in two backward passes.
A contender's turn is ten steps, as in an epoch of local training: the first one finds caches that
the other contenders have emptied, and in turns of three it would be a third of what is measured.
Freed memory is kept in the process for all contenders alike, as fedsim's engines do: on machines
where page faults are dear, every way that allocates per-example gradients is otherwise slowed down
by them.
"""

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from interleaved import measure, print_ratios
from torch import Tensor, nn

from fedsim.clients.dp_sgd.clipping import FlatClipping
from fedsim.clients.dp_sgd.cohort import Member, PrivateCohort
from fedsim.clients.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.dp_sgd.noise import SeededNoise
from fedsim.clients.dp_sgd.per_example.backend import gradients_for
from fedsim.clients.dp_sgd.per_example.clipped_sum import PerExampleGradients, VmapGradients
from fedsim.clients.dp_sgd.per_example.products import add_product, affine, product
from fedsim.clients.dp_sgd.sampling import PoissonSampling
from fedsim.clients.settings import SgdSettings
from fedsim.clients.training.optimizers import Sgd
from fedsim.models.losses import cross_entropy
from fedsim.simulation.memory import keep_freed_memory

Step = Callable[[], object]

STEPS = 10  # of a turn


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
    """Plain SGD on the mean loss of a lot."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    index = torch.arange(len(x))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()

    return step


def fedsim_step(
    make: Callable[[nn.Module, Tensor, Tensor], PerExampleGradients],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
) -> Step:
    """DP-SGD by fedsim: sample, clip, add noise, divide, update."""
    gradients = make(model, x, y)
    values = gradients.parameters.data
    into, optimizer = torch.zeros_like(values), Sgd(SgdSettings(name="sgd", lr=0.01))
    mechanism = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1.0), 1.0, float(len(x)))
    lots, noise = np.random.default_rng(0), SeededNoise(np.random.default_rng(1))

    def step() -> None:
        mechanism.release(gradients, x, y, lots=lots, noise=noise, into=into)
        optimizer.step([values], [into])

    return step


def by_book_keeping(model: nn.Module, x: Tensor, y: Tensor) -> PerExampleGradients:
    """Let fedsim choose: book-keeping for all of these models."""
    return gradients_for(model, cross_entropy, x[:3], y[:3])


def by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> PerExampleGradients:
    """torch.func.vmap over torch.func.grad."""
    return VmapGradients(model, cross_entropy)


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


def contenders(make_model: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Step]:
    """Return every contender that this machine has."""
    found = {
        "plain SGD": plain_step(make_model(), x, y),
        "fedsim": fedsim_step(by_book_keeping, make_model(), x, y),
        "fedsim, vmap": fedsim_step(by_vmap, make_model(), x, y),
    }
    if make_model is mlp:
        found["noise, products alone"] = floor(len(x))
    try:
        import opacus  # noqa: F401
    except ImportError:
        return found
    for mode in ("hooks", "functorch", "ghost"):
        found[f"Opacus, {mode}"] = opacus_step(mode, make_model(), x, y)
    return found


def cohort_step(model: nn.Module, x: Tensor, y: Tensor, clients: int) -> Step:
    """One step of several clients at once."""
    mechanism = DpSgdMechanism(PoissonSampling(1.0), FlatClipping(1.0), 1.0, float(len(x)))
    members = [
        Member(
            mechanism,
            x,
            y,
            np.random.default_rng((k, 0)),
            SeededNoise(np.random.default_rng((k, 1))),
        )
        for k in range(clients)
    ]

    cohort = PrivateCohort(model, cross_entropy, members)
    optimizer = Sgd(SgdSettings(name="sgd", lr=0.01))

    def step() -> None:
        for values, gradient in cohort.gradients():
            optimizer.step([values], [gradient])

    return step


def one_by_one(steps: list[Step]) -> Step:
    """Several clients one after the other."""

    def step() -> None:
        for one in steps:
            one()

    return step


def measure_cohort(*, quick: bool, clients: int = 10, batch: int = 16) -> None:
    """Compare a cohort of MLPs with training its clients one by one, with and without privacy."""
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    steps = {
        "plain SGD, one by one": one_by_one([plain_step(mlp(), x, y) for _ in range(clients)]),
        "fedsim, cohort": cohort_step(mlp(), x, y, clients),
        "fedsim, one by one": one_by_one(
            [fedsim_step(by_book_keeping, mlp(), x, y) for _ in range(clients)]
        ),
        "noise alone": noise_alone(clients * 101_770),
        "noise, products alone": floor(batch, clients),
    }
    timings = measure(
        steps, repetitions=2 if quick else 20, calls=1 if quick else STEPS, clock=time.process_time
    )
    title = f"{clients} clients with an MLP each, batch {batch}"
    print_ratios(title, timings, baseline="plain SGD, one by one")


def noise_alone(size: int) -> Step:
    """What the noise of a step costs by itself."""
    values, noise = torch.zeros(size), SeededNoise(np.random.default_rng(0))
    return lambda: noise.fill_(values, 1.0)


def floor(batch: int, clients: int = 1) -> Step:
    """What no private step of the MLP can do without: its noise, and two products of each layer.

    The first layer's inputs need no gradient, so that there are two products of it and three of the
    other one. Nothing is clipped, gathered, activated or updated.
    """
    noise = SeededNoise(np.random.default_rng(0))
    parts = [
        [
            (torch.randn(out, width), torch.randn(batch, width), torch.randn(batch, out))
            for width, out in ((784, 128), (128, 10))
        ]
        for _ in range(clients)
    ]
    gradients = torch.zeros(clients, 101_770)

    def step() -> None:
        for layers, flat in zip(parts, gradients, strict=True):
            noise.fill_(flat, 1.0)
            start = 0
            for w, x, g in layers:
                affine(x, w, None)
                add_product(flat[start : start + w.numel()].view(w.shape), g.t(), x)
                start += w.numel()
            product(layers[1][2], layers[1][0])

    return step


def main() -> None:
    """Measure every model at every batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, for a smoke test")
    parser.add_argument("--model", choices=sorted(MODELS), help="one model only")
    parser.add_argument("--cohort", action="store_true", help="the cohort only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    names = [arguments.model] if arguments.model else list(MODELS)
    if arguments.cohort:
        names = []
    for name in names:
        for batch in (16,) if arguments.quick else (16, 64, 256):
            torch.manual_seed(0)
            x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
            steps = contenders(MODELS[name], x, y)
            timings = measure(
                steps,
                repetitions=2 if arguments.quick else 8 if batch > 64 else 20,
                calls=1 if arguments.quick else STEPS,
                clock=time.process_time,
            )
            print_ratios(f"{name}, batch {batch}", timings, baseline="plain SGD")
    if not arguments.model:
        measure_cohort(quick=arguments.quick)


if __name__ == "__main__":
    main()
