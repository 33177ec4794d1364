"""The experiments of one checkout in a process of its own: a folder of text files for each.

`python -P -m same.perform CHECKOUT FOLDER [NAME ...]`, with CHECKOUT and the folder of `same` in
PYTHONPATH, is the process.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from click.testing import CliRunner
from flwr.app import Message
from torch import nn

import fedsim
from fedsim.cli import cli
from fedsim.clients import PrivacyEngine
from fedsim.simulation.engines import LocalEngine, LocalGrid
from same.experiments import BASE, EXPERIMENTS, Settings
from same.texts import Texts, value_text

ENGINE = "privacy-engine"
"""The experiment that has no file: `PrivacyEngine` behind an optimizer of torch."""


def perform(names: Sequence[str], folder: Path) -> None:
    """Perform experiments in the working directory, and write their parts into a folder.

    Args:
        names: of experiments; none: all.
        folder: gets a folder of text files for each.

    Raises:
        SystemExit: there is no such experiment, or a run failed.
    """
    Path("base.yaml").write_text(json.dumps(BASE))
    for name in names or [*EXPERIMENTS, ENGINE]:
        settings = EXPERIMENTS.get(name)
        if settings is None and name != ENGINE:
            raise SystemExit(f"no experiment is called {name}: {', '.join([*EXPERIMENTS, ENGINE])}")
        if settings and settings.get("runtime", {}).get("engine") == "ray" and not find_spec("ray"):
            print(f"{name}: skipped, as Ray is not installed")
            continue
        texts = attached_engine() if settings is None else run(name, settings)
        for part, lines in texts.items():
            path = folder / name / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))


def run(name: str, settings: Settings) -> Texts:
    """Return the texts of an experiment, which runs twice: as `fedsim run`, and seen by a grid."""
    texts = Texts()
    keys = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    result = CliRunner().invoke(cli, ["run", "base.yaml", *keys, "--out", name])
    if result.exit_code:
        raise SystemExit(f"{name} failed: {result.output}{result.exception}")
    for line in result.output.splitlines():
        texts.line("terminal", line)
    texts.run(Path(name), in_order="runtime" not in settings)
    if "runtime" not in settings:
        engine = LocalEngine(watched_grid(texts))
        fedsim.run("base.yaml", overrides=settings, out=f"{name}-watched", engine=engine)
    return texts


def watched_grid(texts: Texts) -> type[LocalGrid]:
    """Return the class of a grid in one process that adds all messages to texts."""

    class Watched(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterator[Message]:
            asked = list(messages)
            for message in asked:
                texts.message(f"to {message.metadata.dst_node_id}", message)
            for reply in super().send_and_receive(asked, timeout=timeout):
                texts.message(f"from {reply.metadata.src_node_id}", reply)
                yield reply

    return Watched


def attached_engine() -> Texts:
    """Return the texts of private steps by each of the two ways of `PrivacyEngine`."""
    texts = Texts()
    torch.manual_seed(0)
    x, y = torch.randn(120, 8), torch.randint(3, (120,))
    for seed, reduction in enumerate(("none", "mean")):
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        engine = PrivacyEngine(
            model, 20, 120, noise_multiplier=1.1, max_physical_batch=8, seed=seed
        )
        engine.attach(optimizer)
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        for inputs, labels in engine.batches(x, y, steps=8):
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            if reduction == "none":
                engine.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        for key, value in model.state_dict().items():
            texts.line("model", f"{reduction} {key} {value_text(value)}")
        texts.line("ledger", f"{reduction} {json.dumps(engine.ledger.to_list())}")
        texts.line("epsilon", f"{reduction} {engine.get_privacy_spent(delta=1e-3)}")
    return texts


def _main(checkout: str, folder: str, *names: str) -> None:
    """Be the process; refuse another fedsim than that of the checkout."""
    found = Path(fedsim.__file__).resolve()
    if not found.is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"fedsim is that of {found.parent}, not of {checkout}")
    perform(names, Path(folder))


if __name__ == "__main__":
    _main(*sys.argv[1:])
