"""Digest of an experiment's plug-ins, for the policy of a node. Nothing is imported for it."""

import hashlib
import json

from fedsim.core.plugin_sources import read_sources
from fedsim.deployment.errors import DeploymentError
from fedsim.experiment import LoadedExperiment


def plugin_digest(loaded: LoadedExperiment) -> str | None:
    """Return the SHA-256 of an experiment's plug-ins; None without plug-ins.

    It covers their names and the content of every source file that their import statements lead to.
    Versions of installed packages are no part of it: those are the node's own.

    Raises:
        DeploymentError: the file of a plug-in cannot be read.
    """
    references = sorted(loaded.experiment.plugins)
    if not references:
        return None
    try:
        files = dict(read_sources(references, base=loaded.base).files)
    except OSError as error:
        raise DeploymentError(f"cannot read {error.filename}: {error.strerror}") from error
    content = json.dumps([references, files], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
