"""Writer of an experiment as a Flower app: a directory for `flwr run`.

The app contains the experiment, its plug-in files, and two modules of three lines that import the
installed fedsim. It contains no data: every node has, or generates, its own.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fedsim.core.errors import describe_os_error
from fedsim.core.plugin_sources import plugin_directory, trace_plugin
from fedsim.data.settings import FilesPartition
from fedsim.experiment import Experiment, LoadedExperiment, dump_experiment
from fedsim.federation.apps import num_helpers
from fedsim.planning.validation import plugin_digest
from fedsim.starter import write_files
from fedsim.tools.deployment.private_files import DeploymentError

PACKAGE = "fedsim_app"

_FILES = Path(__file__).with_name("files")
_MODULES = ("__init__.py", "server_app.py", "client_app.py")


@dataclass(frozen=True)
class WrittenApp:
    """A Flower app on disk."""

    path: Path
    num_nodes: int  # that the app waits for: one for each client and helper
    node_files: tuple[Path, ...]  # of data, budgets, initial weights: every node needs them
    plugin_digest: str | None  # for `plugin_digests` of a node's policy; None without plug-ins


def write_app(loaded: LoadedExperiment, out: Path) -> WrittenApp:
    """Write the Flower app of an experiment into a directory, which must be new or empty."""
    _refuse_simulations(loaded.experiment)
    clients = loaded.experiment.data.partition.num_clients
    if clients is None:
        raise DeploymentError(
            "data.partition.num_clients: missing; only the data know the number of clients, and "
            "an app names its SuperNodes before it sees any: write it"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DeploymentError(f"{out} exists and is not empty; choose another --out")
    plugins = _plugin_files(loaded)
    experiment, node_files = _with_absolute_files(loaded)
    package = out / PACKAGE
    slug = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")
    text = (_FILES / "pyproject.toml").read_text(encoding="utf-8")
    write_files(out, {"pyproject.toml": text.format(name=experiment.name, slug=slug)})
    write_files(package, {"__init__.py": "", "experiment.yaml": dump_experiment(experiment)})
    for module in _FILES.glob("*.py"):
        shutil.copyfile(module, package / module.name)
    for plugin in plugins:
        target = package / plugin
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(loaded.base / plugin, target)
    digest = plugin_digest(LoadedExperiment(experiment, None, package))
    return WrittenApp(out, clients + num_helpers(experiment), node_files, digest)


def _refuse_simulations(experiment: Experiment) -> None:
    personal, privacy = experiment.personalization, experiment.privacy
    if personal is not None and personal.public_data:
        raise DeploymentError(
            "personalization.public_data: scores of personal models are for simulations, and a "
            "node's examples are its own; deploy with personalization.public_data=false: each node "
            "calls fedsim.personalize with the final global model"
        )
    if privacy is not None and experiment.federation.participation.scheme == "poisson":
        raise DeploymentError(
            "federation.participation.scheme: poisson draws private clients in secret, and a "
            "node's ledger would show when it was drawn; deploy with "
            "federation.participation.scheme=uniform, or simulate with fedsim run"
        )
    if reason := experiment.not_deployed:
        raise DeploymentError(f"{reason}, or simulate with fedsim run")
    if experiment.runtime.trackers:
        raise DeploymentError(
            "runtime.trackers: trackers watch simulations, and a deployed server calls none; "
            "deploy with runtime.trackers=[]"
        )
    if isinstance(experiment.data.partition, FilesPartition):
        raise DeploymentError(
            "data.partition.scheme: files is for simulations: the ledger of a node's data belongs "
            "to one file; write the rows into one table with a column that names the client, and "
            "use scheme: column"
        )


def _plugin_files(loaded: LoadedExperiment) -> list[PurePosixPath]:
    """Return the plug-in files and the modules that they import, as paths from the experiment."""
    base, files = loaded.base.resolve(), list[PurePosixPath]()
    for reference in loaded.experiment.plugins:
        if plugin_directory(reference, base=base) != base:
            raise DeploymentError(
                f"{reference}: lies outside of {loaded.base}; an app contains only files from "
                "there: move it there, or install it as a package on every node"
            )
        try:
            trace, _ = trace_plugin(reference, base=base)
        except OSError as error:
            raise DeploymentError(f"{reference}: cannot read {describe_os_error(error)}") from error
        files += [PurePosixPath(f.place) for f in trace.files.values() if f.directory == base]
    for file in files:
        if str(file) in _MODULES:
            problem = "the app has a file of its own of this name; rename yours"
            raise DeploymentError(f"{loaded.base / file}: {problem}")
    return list(dict.fromkeys(files))


def _with_absolute_files(loaded: LoadedExperiment) -> tuple[Experiment, tuple[Path, ...]]:
    """Return (experiment with absolute paths of the files that nodes have, these paths)."""
    experiment, files = loaded.experiment, list[Path]()

    def absolute(path: str | None) -> str | None:
        if path is None:
            return None
        files.append((loaded.base / Path(path).expanduser()).resolve())
        return str(files[-1])

    dataset, data = experiment.data.dataset, dict[str, Any]()
    if not isinstance(dataset, str):
        named = {"path": absolute(dataset.path), "test": absolute(dataset.test)}
        data["dataset"] = dataset.model_copy(update=named)
    if experiment.data.folder is not None:
        data["args"] = {**experiment.data.args, "path": absolute(experiment.data.folder)}
    placed: dict[str, Any] = {
        "data": experiment.data.model_copy(update=data),
        "model": experiment.model.model_copy(update={"init": absolute(experiment.model.init)}),
    }
    if experiment.privacy is not None:
        clients = {
            name: entry.model_copy(update={"csv": absolute(entry.csv)})
            for name, entry in experiment.privacy.clients.items()
        }
        placed["privacy"] = experiment.privacy.model_copy(update={"clients": clients})
    return experiment.model_copy(update=placed), tuple(files)
