"""Reports of `fedsim validate` on the code and files of an experiment, and on its data.

An experiment file may come from an untrusted source. The footprint lists the code that would run
and the files that would be read, for review before the run. No plug-in is imported for this.

With `--data` every check is made that `fedsim run` makes before its first round. The ranges of
values and the classes that are shown come from the public test set. Of a client's data, only the
number of examples is used, and it is shown only if it is public.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.core.commands import Phases
from fedsim.core.formatting import some_of
from fedsim.core.plugin_sources import read_sources
from fedsim.data.file_names import data_files
from fedsim.experiment import LoadedExperiment
from fedsim.experiment.public_tables import named_table

if TYPE_CHECKING:
    from fedsim.federation.federation import Federation

_MAX_CLASSES = 12  # in a line of text


@dataclass(frozen=True)
class Footprint:
    """The code that an experiment would run, and the files that it would read."""

    code: tuple[str, ...]  # plug-ins, as written in the file
    files: tuple[Path, ...]  # also of plug-ins, with links resolved
    outside: tuple[Path, ...]  # those that are not below the experiment's directory
    hub: tuple[str, ...] = ()  # names of datasets

    def lines(self) -> list[str]:
        """Return the footprint as lines of text, one for each kind of code or files that it has."""
        kinds = (
            ("runs the code of", self.code),
            ("reads", self.files),
            ("outside of the experiment's directory", self.outside),
            ("may fetch from the hub of Hugging Face", self.hub),
        )
        return [f"  {label}: {', '.join(map(str, names))}" for label, names in kinds if names]


def find_footprint(loaded: LoadedExperiment) -> Footprint:
    """Return the code that an experiment would run and the files that it would read."""
    experiment, base = loaded.experiment, loaded.base.resolve()
    code = (*experiment.plugins, *(name for name in experiment.runtime.trackers if ":" in name))
    named = [str(path) for path in data_files(experiment.data, loaded.base)]
    # A node asks about settings whose files are not read yet.
    unread = named_table(experiment.federation.participation)
    single = (experiment.data.folder, loaded.table, unread, experiment.model.init)
    named += [name for name in single if name is not None]
    budgets = {} if experiment.privacy is None else experiment.privacy.clients
    named += [entry.csv for entry in budgets.values() if entry.csv is not None]
    if experiment.secure_aggregation is not None:
        keys = experiment.secure_aggregation.keys
        named += [*keys.helper_files, *keys.client_files]
    sources = (name.rpartition(":")[0] for name in code)
    named += [source for source in sources if source.endswith(".py")]
    files = tuple((loaded.base / Path(name).expanduser()).resolve() for name in named)
    outside = tuple(path for path in files if not path.is_relative_to(base))
    is_hub = experiment.data.dataset == "huggingface"
    fetched = experiment.data.args.get("name") if is_hub else None
    return Footprint(code, files, outside, () if fetched is None else (fetched,))


def plugin_digest(loaded: LoadedExperiment) -> str | None:
    """Return the SHA-256 of an experiment's plug-ins; None without plug-ins.

    It covers the names of the plug-ins and the content of every source file that their import
    statements reach, and no versions of installed packages, which may differ between nodes. A file
    that cannot be read raises a PluginError.
    """
    references = sorted(loaded.experiment.plugins)
    if not references:
        return None
    files = dict(read_sources(references, base=loaded.base).files)
    content = json.dumps([references, files], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class DataFindings:
    """Facts about the data that a run of an experiment would use."""

    federation: "Federation"
    client_examples: tuple[int, ...] | None  # public number of each client; None if private
    test_range: tuple[float, float]  # smallest and largest value of any feature in the test set
    test_classes: dict[str, int] | None  # test examples of each; None if targets are no classes

    @property
    def hints(self) -> list[str]:
        """Warnings about data that a run accepts, but that harm its training or its scores."""
        low, high = self.test_range
        absent = [name for name, count in (self.test_classes or {}).items() if count == 0]
        hints = list[str]()
        if absent:
            hints.append(
                f"the test set has no example of class {some_of(absent, 5)}, so no score tells how "
                "well it is learned; raise data.test_fraction or bring a test set"
            )
        if low == high:
            hints.append(
                f"all features are {low:g} in the test set, and nothing can be learned from them; "
                "check the columns and the scale"
            )
        return hints

    def lines(self) -> list[str]:
        """Return the facts about the data as lines of text."""
        low, high = self.test_range
        shape = " x ".join(map(str, self.federation.data.input_shape))
        values = "value" if shape == "1" else "values"
        lines = [f"an example has {shape} {values}, from {low:.4g} to {high:.4g} in the test set"]
        if (classes := self.test_classes) is not None:
            counts = [f"{name}: {n:,}" for name, n in classes.items()]
            lines.append(f"classes of the test set: {some_of(counts, _MAX_CLASSES)}")
        lines.append(f"the model trains {self.federation.sizes['trained_parameters']:,} values")
        return [*lines, *(f"hint: {hint}" for hint in self.hints)]

    def to_json(self) -> dict[str, Any]:
        """Return the facts about the data as a JSON value."""
        data, classes = self.federation.data, self.test_classes
        return {
            "clients": self.federation.num_clients,
            "client_examples": self.client_examples,
            "test_examples": len(data.test),
            "input_shape": data.input_shape,
            "test_range": self.test_range,
            "test_classes": classes and [{"class": c, "examples": n} for c, n in classes.items()],
            "trained_values": self.federation.sizes["trained_parameters"],
            "hints": self.hints,
        }


def check_data(loaded: LoadedExperiment, *, phases: Phases | None = None) -> DataFindings:
    """Return facts about the data, after every check that a run makes before its first round.

    Plug-ins are imported and called, data are read, and the model is built. Nothing is trained,
    charged or written.

    Raises:
        ValueError: the experiment cannot be assembled (see `assemble`).
        PrivacyBudgetError: the planned steps exceed the clients' budgets.
        MechanismMismatchError: the noise differs from the noise that clients are charged for.
    """
    from fedsim.federation.assembly import assemble, refuse_overspending
    from fedsim.federation.mechanism_probe import probe_mechanisms

    federation = assemble(loaded, ledger=None, phases=phases)
    refuse_overspending(federation)
    federation.blocks.check_round(1)
    probe_mechanisms(federation)
    data, plans, classes = federation.data, federation.plan.clients, None
    sizes = data.clients.sizes if plans is None else [plan.examples for plan in plans]
    are_private = loaded.experiment.release_kind.protects_client
    if data.num_classes is not None:
        names = data.class_names or tuple(map(str, range(data.num_classes)))
        counts = np.bincount(data.test.targets, minlength=len(names))
        classes = dict(zip(names, counts.tolist(), strict=True))
    low, high = float(data.test.features.min()), float(data.test.features.max())
    return DataFindings(federation, None if are_private else tuple(sizes), (low, high), classes)
