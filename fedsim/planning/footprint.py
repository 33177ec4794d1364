"""Footprint of an experiment: the code that it executes and the files that it reads.

An experiment file may come from an untrusted source. Nothing is imported here, and nothing but
plug-ins opened, for their digest, so the user can review the footprint before the run.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.errors import InputError
from fedsim.core.plugin_sources import read_sources
from fedsim.data.file_names import data_files
from fedsim.experiment.load import LoadedExperiment
from fedsim.experiment.public_tables import named_table


@dataclass(frozen=True)
class Footprint:
    """The code and the files that an experiment names.

    Attributes:
        code: plug-ins that the experiment runs, as written in it.
        files: files that the experiment reads, including plug-in files, with links resolved.
        outside: members of `files` that are not below the experiment's directory.
        hub: names of datasets that may be fetched from the hub of Hugging Face.
    """

    code: tuple[str, ...]
    files: tuple[Path, ...]
    outside: tuple[Path, ...]
    hub: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return a line of text for each kind; built-in names need none."""
        kinds = (
            ("runs the code of", self.code),
            ("reads", self.files),
            ("outside of the experiment's directory", self.outside),
            ("may fetch from the hub of Hugging Face", self.hub),
        )
        return [f"  {what}: {', '.join(map(str, names))}" for what, names in kinds if names]


def find_footprint(loaded: LoadedExperiment) -> Footprint:
    """Return the code that an experiment would execute and the files that it would read."""
    experiment = loaded.experiment
    dataset = experiment.data.dataset
    code = [name for name in (experiment.model.name, experiment.model.loss) if ":" in name]
    strategy = experiment.federation.algorithm.name
    code += [strategy] if ":" in strategy else []
    code += [name for name in experiment.runtime.trackers if ":" in name]
    scheme = experiment.data.partition.scheme
    code += [scheme] if ":" in scheme else []
    named = [str(path) for path in data_files(experiment.data, loaded.base)]
    if isinstance(dataset, str) and ":" in dataset:
        code.append(dataset)
    if experiment.data.folder is not None:
        named.append(experiment.data.folder)
    table = named_table(experiment.federation.participation)
    named += [] if table is None else [table[1]]
    if experiment.model.init is not None:
        named.append(experiment.model.init)
    if experiment.privacy is not None:
        named += [one.csv for one in experiment.privacy.clients.values() if one.csv is not None]
    if experiment.secure_aggregation is not None:
        named += experiment.secure_aggregation.keys.helper_files
        named += experiment.secure_aggregation.keys.client_files
    sources = [name.rpartition(":")[0] for name in code]
    named += [source for source in sources if source.endswith(".py")]
    files = tuple((loaded.base / Path(name).expanduser()).resolve() for name in named)
    home = loaded.base.resolve()
    outside = tuple(path for path in files if not path.is_relative_to(home))
    fetched = experiment.data.args.get("name") if dataset == "huggingface" else None
    return Footprint(tuple(code), files, outside, () if fetched is None else (fetched,))


def plugin_digest(loaded: LoadedExperiment) -> str | None:
    """Return the SHA-256 of an experiment's plug-ins; None without plug-ins.

    It covers their names and the content of every source file that their import statements lead to.
    Versions of installed packages are no part of it: those are the node's own.

    Raises:
        InputError: the file of a plug-in cannot be read.
    """
    references = sorted(loaded.experiment.plugins)
    if not references:
        return None
    try:
        files = dict(read_sources(references, base=loaded.base).files)
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    content = json.dumps([references, files], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
