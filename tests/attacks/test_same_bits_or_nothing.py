"""A client that answers a round again gives the same bits or nothing, whatever file was edited."""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedsim.accountant.ledger.journal import FileJournal
from fedsim.clients.app import BatchClientApp
from fedsim.core import plugin_sources as sources_module
from fedsim.core.plugins import PluginError, resolve
from fedsim.experiment import load_experiment
from fedsim.federation import nodes
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest, to_arrays
from fedsim.protocol.errors import NOISE_REUSE
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.runner import run_experiment
from fedsim.tools.deployment.flower_app import PACKAGE, write_app
from fedsim.tracking.callbacks import RunCallback

PLUGIN = """
import numpy as np
import torch

{imports}


def load(seed=0):
    rng = np.random.default_rng(0)
    return rng.standard_normal((60, 4)).astype(np.float32), rng.integers(0, 3, 60)


def build():
    return torch.nn.Linear(4, 3)


def loss(outputs, targets):
    {inside}
    return scale({scale}) * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def scale(value):
    return value
"""
FACTOR = "FACTOR = 1.0\n"
EDITED = "FACTOR = 3.0\n"

# How the plug-in reads FACTOR: files, the edited one among them; imports; in the loss; the factor.
LAYOUTS: dict[str, tuple[dict[str, str], str, str, str]] = {
    "import": ({"edited.py": FACTOR}, "import edited", "", "edited.FACTOR"),
    "from import": ({"edited.py": FACTOR}, "from edited import FACTOR", "", "FACTOR"),
    "from . import": ({"edited.py": FACTOR}, "from . import edited", "", "edited.FACTOR"),
    "in a function": ({"edited.py": FACTOR}, "", "import edited", "edited.FACTOR"),
    "star": ({"edited.py": FACTOR}, "from edited import *", "", "FACTOR"),
    "two steps": (
        {"helper.py": "from edited import FACTOR\n", "edited.py": FACTOR},
        *("import helper", "", "helper.FACTOR"),
    ),
    "circle": (
        {"helper.py": "import edited\n", "edited.py": "import helper\n" + FACTOR},
        *("import helper", "", "helper.edited.FACTOR"),
    ),
    "package": (
        {"lib/__init__.py": "from .edited import FACTOR\n", "lib/edited.py": FACTOR},
        *("import lib", "", "lib.FACTOR"),
    ),
    "its __init__": (
        {"lib/__init__.py": FACTOR, "lib/other.py": "from . import FACTOR\n"},
        *("import lib.other as other", "", "other.FACTOR"),
    ),
    "two dots": (
        {
            **{"lib/__init__.py": "", "lib/a/__init__.py": "", "lib/edited.py": FACTOR},
            "lib/a/b.py": "from .. import edited\nfrom ..edited import FACTOR\n",
        },
        *("from lib.a import b", "", "b.edited.FACTOR"),
    ),
    "without __init__": ({"lib/edited.py": FACTOR}, "import lib.edited", "", "lib.edited.FACTOR"),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path, request.param)


def write(base: Path, name: str) -> Path:
    files, imports, inside, scale = LAYOUTS[name]
    plugin = PLUGIN.format(imports=imports, inside=inside, scale=scale)
    for place, text in {**files, "p.py": plugin}.items():
        (base / place).parent.mkdir(exist_ok=True, parents=True)
        (base / place).write_text(text)
    return base


def edit(base: Path) -> Path:
    """Edit the module that holds the factor: same size, same second, and a moment later."""
    (found,) = [path for path in base.rglob("*.py") if FACTOR in path.read_text()]
    found.write_text(found.read_text().replace(FACTOR, EDITED))
    return found


def experiment(**privacy: Any) -> dict[str, Any]:
    return {
        "name": "identity",
        "data": {"dataset": "./p.py:load", "partition": {"scheme": "iid", "num_clients": 3}},
        "model": {"name": "./p.py:build", "loss": "./p.py:loss"},
        "federation": {"rounds": 3},
        "local": {"steps": 2, "batch_size": 8},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5, **privacy},
    }


def federation(base: Path, **privacy: Any) -> Federation:
    return assemble(load_experiment(experiment(**privacy), base=base), ledger=base / "l.jsonl")


def answer(of: Federation, arrays: ArrayRecord) -> Message:
    """Ask client 0 for round 1; its state is lost, so the ledger alone remembers."""
    with server_identity(1):
        message = TrainRequest(1, arrays).to_message(7)
        app = BatchClientApp(of.client_task, block_of=lambda round_number, client: (0, 1))
        return app(message, Context(1, 7, {"partition-id": 0}, RecordDict(), {}))


@pytest.mark.parametrize("layout", ["circle", "package"], indirect=True)
def test_an_edited_module_beside_the_plugin_is_no_repetition(layout: Path) -> None:
    arrays = federation(layout).initial_arrays()
    first = TrainReply.from_message(answer(federation(layout), arrays))
    edited = edit(layout)
    second = answer(federation(layout), arrays)
    assert second.has_error(), "another answer under the same noise"
    assert second.error.code == NOISE_REUSE
    assert len(FileJournal(layout / "l.jsonl").history(0)) == 1
    edited.write_text(edited.read_text().replace(EDITED, FACTOR))
    again = TrainReply.from_message(answer(federation(layout), arrays))
    assert digest(to_arrays(again.arrays)) == digest(to_arrays(first.arrays))


def test_under_secure_noise_an_edited_module_is_a_new_charge(tmp_path: Path) -> None:
    base = write(tmp_path, "two steps")
    arrays = federation(base, noise="secure").initial_arrays()
    for edits in range(2):
        if edits:
            edit(base)
        reply = TrainReply.from_message(answer(federation(base, noise="secure"), arrays))
        assert reply.spend is not None
        assert reply.spend.rounds == edits + 1
    requests = [json.loads(line)["request"] for line in (base / "l.jsonl").open()]
    assert len(set(requests)) == 2


def test_the_code_that_runs_is_the_code_of_the_digest(layout: Path) -> None:
    """In one process: the module was imported before the edit, by the plug-in."""

    def loss_and_digest() -> tuple[float, str]:
        of = federation(layout)
        request = TrainRequest(1, of.initial_arrays())
        asked = of.client_task(0).request_digest(request, (0, 1), "m")
        outputs = of.model.module(torch_of(np.ones((1, 4), dtype=np.float32)))
        return of.model.loss(outputs, torch_of(np.zeros(1, dtype=np.int64))).item(), asked

    before, digest_before = loss_and_digest()
    edited = edit(layout)
    after, digest_after = loss_and_digest()
    assert after == pytest.approx(3.0 * before)
    assert digest_after != digest_before
    edited.write_text(edited.read_text().replace(EDITED, FACTOR))
    assert loss_and_digest() == (before, digest_before)


def torch_of(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(values)


def test_a_module_that_the_process_has_imported_is_not_run_in_its_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write(tmp_path, "import")
    monkeypatch.syspath_prepend(base)
    __import__("edited")  # as a notebook does
    try:
        edit(base)
        loss = resolve("./p.py:loss", base=base, setting="x")
        assert loss.__globals__["edited"].FACTOR == 3.0
        assert sys.modules["edited"].FACTOR == 1.0, "the notebook's own module is left alone"
    finally:
        del sys.modules["edited"]


def test_an_experiment_that_is_loaded_keeps_its_code(tmp_path: Path) -> None:
    """An import inside the loss runs for the first time after the edit."""
    base = write(tmp_path, "in a function")
    old = resolve("./p.py:loss", base=base, setting="x")
    edit(base)
    new = resolve("./p.py:loss", base=base, setting="x")
    outputs, targets = torch_of(np.zeros((1, 3), np.float32)), torch_of(np.zeros(1, np.int64))
    assert new(outputs, targets).item() == pytest.approx(3.0 * old(outputs, targets).item())


def test_a_module_named_in_no_import_statement_is_refused(tmp_path: Path) -> None:
    (tmp_path / "edited.py").write_text(FACTOR)
    (tmp_path / "p.py").write_text("def load(seed=0):\n    return __import__('edi' + 'ted')\n")
    load = resolve("./p.py:load", base=tmp_path, setting="x")
    with pytest.raises(ImportError, match="no import statement of the plug-in names it"):
        load()


def test_a_module_that_appears_later_is_seen(tmp_path: Path) -> None:
    """The plug-in does not change, but what its import finds does."""
    text = "try:\n    from edited import FACTOR\nexcept ImportError:\n    FACTOR = 1.0\n"
    (tmp_path / "p.py").write_text(text + "def loss():\n    return FACTOR\n")
    before = read(tmp_path)
    assert resolve("./p.py:loss", base=tmp_path, setting="x")() == 1.0
    (tmp_path / "edited.py").write_text(EDITED)
    assert read(tmp_path) != before
    assert resolve("./p.py:loss", base=tmp_path, setting="x")() == 3.0


def read(base: Path, *references: str) -> Any:
    return sources_module.read_sources(references or ("./p.py:loss",), base=base)


def test_installed_packages_count_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text("def f():\n    from sklearn import metrics\n")
    (tmp_path / "p.py").write_text("import helper\n")
    before = read(tmp_path)
    assert before.packages["scikit-learn"] == importlib.metadata.version("scikit-learn")
    monkeypatch.setattr(sources_module, "version", lambda name: "99.0")
    assert read(tmp_path).digest != before.digest


def test_own_modules_outside_of_the_directory_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`PYTHONPATH` leads to a project beside the experiments. An edit after the import is refused,
    since the process would run the old code under the digest of the new one.
    """
    project, base = tmp_path / "project", tmp_path / "experiments"
    write(base, "package")
    project.mkdir()
    (base / "lib").rename(project / "lib_of_a_project")
    (base / "p.py").write_text("def loss():\n    import lib_of_a_project\n")
    monkeypatch.syspath_prepend(project)
    for reference in ("./p.py:loss", "lib_of_a_project.edited:FACTOR.as_integer_ratio"):
        before = read(base, reference)
        loaded = resolve(reference, base=base, setting="x")
        loaded()
        resolve(reference, base=base, setting="x")
        edited = edit(project)
        assert read(base, reference).digest != before.digest
        with pytest.raises(
            PluginError, match=r"edited\.py was edited after .* restart the process"
        ):
            resolve(reference, base=base, setting="x")
        edited.write_text(edited.read_text().replace(EDITED, FACTOR))
    for name in ("lib_of_a_project", "lib_of_a_project.edited"):
        del sys.modules[name]


@pytest.mark.parametrize("layout", ["two steps", "package"], indirect=True)
def test_a_run_is_not_resumed_with_an_edited_module(
    stop_after: Callable[[int], RunCallback], layout: Path
) -> None:
    out = layout / "r"
    run_experiment(experiment(), base=layout, out=out, callback=stop_after(1))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    edited = edit(layout)
    name = edited.relative_to(layout).as_posix()
    with pytest.raises(RunDirectoryError, match=f"the plug-in file {name} changed since the run"):
        run_experiment(experiment(), base=layout, out=out, resume=True)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() ^ before.keys()} <= {"lock"}
    assert all(after[path] == content for path, content in before.items()), "something was spent"
    edited.write_text(edited.read_text().replace(EDITED, FACTOR))
    assert run_experiment(experiment(), base=layout, out=out, resume=True).status == "completed"


@pytest.mark.parametrize("layout", ["two steps", "package"], indirect=True)
def test_a_deployed_app_has_the_modules_and_the_same_digest(
    layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_experiment(experiment(), base=layout)
    here = sources_module.read_sources(loaded.experiment.plugins, base=layout)
    write_app(loaded, layout / "app")
    node = load_experiment(layout / "app" / PACKAGE / "experiment.yaml")
    assert sources_module.read_sources(node.experiment.plugins, base=node.base) == here
    deployed = assemble(node, ledger=None)
    task, there = federation(layout).client_task(0), deployed.client_task(0)
    request = TrainRequest(1, deployed.initial_arrays())
    assert task.request_digest(request, (0, 1), "m") == there.request_digest(request, (0, 1), "m")


def test_a_worker_that_starts_after_an_edit_does_not_train(tmp_path: Path) -> None:
    """A Ray actor that replaces a lost one loads the plug-ins anew, in mid-run."""
    base = write(tmp_path, "two steps")
    of = federation(base)
    worker = nodes.FederationClientApp(of, None).shard([0])
    journal = FileJournal(tmp_path / "ledger.jsonl")
    worker(journal)
    edit(base)
    with pytest.raises(PluginError, match=r"the plug-in file edited\.py changed while"):
        worker(journal)


def test_a_file_that_changes_during_assembly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model comes from the old file, the loss from the new one."""
    from fedsim.federation import assembly

    base, load = write(tmp_path, "import"), assembly.initial_model

    def slow(*arguments: Any, **options: Any) -> Any:
        edit(base)
        return load(*arguments, **options)

    monkeypatch.setattr(assembly, "initial_model", slow)
    with pytest.raises(PluginError, match=r"the plug-in file edited\.py changed while"):
        federation(base)


def test_modules_are_shared_by_the_plugins_of_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "kinds.py").write_text("class Kind: ...\n")
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("from kinds import Kind\ndef f(): return Kind\n")
    kinds = {resolve(f"./{name}.py:f", base=tmp_path, setting="x")() for name in "ab"}
    assert len(kinds) == 1
