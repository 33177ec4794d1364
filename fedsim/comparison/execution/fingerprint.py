"""One hash over everything that a run depends on; a finished run with the same hash is reused."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import fedsim
from fedsim.experiment import LoadedExperiment
from fedsim.federation.conditions import plugin_sources
from fedsim.runs.private_digest import private_digest

# Keys that change no number of a run.
_WITHOUT_EFFECT = ("name", "runtime")
_PACKAGES = ("torch", "numpy", "scipy", "flwr", "scikit-learn")
_ROOMS = ("fedsim.accountant", "fedsim.clients", "fedsim.server")
# Parts of fedsim/ that compute no run.
_PRESENTATION_ONLY = ("cli", "comparison", "report", "tracking")


def run_fingerprint(loaded: LoadedExperiment) -> str:
    """Return the SHA-256 of everything that a run of the experiment depends on, files keyed.

    Guarantee: it changes with every setting (defaults included, `name` and `runtime` excluded),
    with every byte of a file named by the experiment, with the plug-ins' sources
    (`fedsim.core.plugin_sources`), with fedsim's own source, and with the versions of the numeric
    libraries.
    """
    settings = loaded.experiment.model_dump(mode="json")
    for key in _WITHOUT_EFFECT:
        settings.pop(key)
    content = {
        "experiment": settings,
        "files": {
            name: _file_digest(path, path.stat().st_mtime_ns, path.stat().st_size)
            for name, path in sorted(_named_files(settings, loaded.base))
        },
        "plug-ins": plugin_sources(loaded.experiment, loaded.base).digest,
        "fedsim": fedsim.__version__,
        "source": _source_digest(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _named_files(settings: object, base: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file that the settings name by its path."""
    if isinstance(settings, dict):
        for value in settings.values():
            yield from _named_files(value, base)
    elif isinstance(settings, list):
        for value in settings:
            yield from _named_files(value, base)
    elif isinstance(settings, str) and settings and "\0" not in settings:
        path = base / Path(settings).expanduser()
        if path.is_file():
            yield settings, path


@lru_cache(maxsize=256)
def _file_digest(path: Path, _modified: int, _size: int) -> str:
    return private_digest([np.fromfile(path, np.uint8)])  # it may have private examples


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Return a digest of the code that computes runs: a checkout changes within one version."""
    digest = hashlib.sha256()
    own = Path(fedsim.__file__).parent
    roots = [own]
    for room in _ROOMS:
        spec = find_spec(room)
        roots += [Path(location) for location in (spec and spec.submodule_search_locations) or ()]
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if root == own and relative.parts[0] in _PRESENTATION_ONLY:
                continue
            digest.update(f"{root.name}/{relative.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
