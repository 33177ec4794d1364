"""Digests of a run's inputs (data, model, plug-ins), and a description of its environment.

Files that an experiment names may change before a run is resumed. With other data, the resumed run
would keep charges for examples on which it no longer trains. The digests show such a change.

An adversary that knows all examples but one could test each guess of the last one against a plain
hash. So the digest of the data is keyed. The user's first run makes the key, in a file outside of
all run directories. Digests with the same key can be compared. Without the key they look random.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import numpy as np

import fedsim
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.errors import StorageError, describe_os_error
from fedsim.experiment import Experiment
from fedsim.federation.federation import Federation
from fedsim.federation.schedule import map_shared
from fedsim.protocol.arrays import digest
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.files import SCHEMAS
from fedsim.runs.resume import differences

_KEY_BYTES, _DIGEST_BYTES = 32, 32
PATTERN = "^[0-9a-f]{16}:[0-9a-f]{64}$"


def key_path() -> Path:
    """Return the path of the key file: `fedsim/data.key` in $XDG_STATE_HOME or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "fedsim" / "data.key"


def private_digest(arrays: Iterable[np.ndarray]) -> str:
    """Return a keyed BLAKE2b digest of arrays with their types and shapes.

    The result is `NAME:DIGEST`, where the name identifies the user's key (`key_path`).

    Guarantee: without the key, the digest is a pseudorandom function's value and tells nothing of
    the arrays. With the same key, equal digests mean equal arrays, up to a collision.

    Raises:
        StorageError: the key can neither be read nor written.
    """
    key = _key()
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=key)
    for array in arrays:
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    name = hashlib.blake2b(b"name", digest_size=8, key=key).hexdigest()
    return f"{name}:{state.hexdigest()}"


def have_one_key(first: str, second: str) -> bool:
    """Whether two digests of `private_digest` have the same key, and so can be compared."""
    return first.partition(":")[0] == second.partition(":")[0]


def _key() -> bytes:
    """Return the key; the user's first call creates it, readable by its owner alone."""
    path = key_path()
    try:
        if not path.exists():
            _make(path)
        key = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"the key of digests of private data: {describe_os_error(error)}; set XDG_STATE_HOME "
            "to a folder of your own that can be written"
        ) from error
    if len(key) != _KEY_BYTES:
        raise StorageError(f"{path} is damaged: it has {len(key)} bytes, not {_KEY_BYTES}")
    return key


def _make(path: Path) -> None:
    """Create the key, whole or not at all; of two processes that try, one succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(os.urandom(_KEY_BYTES))
    try:
        with suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()


_WHAT = {
    "data": "the data, or how they are divided among the clients,",
    "test": "the targets of the test set",
    "model": "the initial model",
    "privacy": "a client's noise, δ or target",
    "objects": "a value that the Python objects of the experiment use",
}


def fingerprint(federation: Federation) -> dict[str, str]:
    """Return digests of data, initial model, privacy mechanisms and plug-ins' sources, by name.

    The digest of the data is keyed, so that an adversary with the run directory cannot test guesses
    of an example. Runs with the same digest `test`, of the test set's targets, have comparable
    scores. No digest covers the number of rounds, as a resumed run may have more.
    """
    data, targets = federation.data, federation.data.test.targets
    examples = chain([data.test], data.clients, data.held_out or ())
    return {
        "data": private_digest(a for part in examples for a in (part.features, part.targets)),
        "test": _sha256([f"{targets.dtype}{targets.shape}".encode(), targets.tobytes()]),
        "model": digest(federation.initial_arrays()),
        "privacy": _sha256(map_shared(_mechanism_bytes, federation.plan.clients or ())),
        **federation.sources.entries,
        **objects_digest(federation.experiment),
    }


def objects_digest(experiment: Experiment) -> dict[str, str]:
    """Return {"objects": a keyed digest of all values that the experiment's Python objects use}.

    Python objects are classes and functions given in place of names. Their values may come from
    private examples. Without such objects, the result is empty.
    """
    texts = [text for plugin in experiment.objects for text in plugin.code().values]
    values = [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]
    return {"objects": private_digest(values)} if experiment.objects else {}


def refuse_other_inputs(before: Mapping[str, str], federation: Federation) -> None:
    """Check that a run resumes with the inputs that it began with; `before` has their digests.

    A RunDirectoryError names an input that differs.
    """
    now = fingerprint(federation)
    if not have_one_key(before.get("data", ""), now["data"]):
        raise RunDirectoryError(
            f"the digest of the data was made with another key than {key_path()}, so nobody can "
            "tell whether the data are the same: resume where the run began, copy its key here, "
            "or start a new run in another --out"
        )
    for name in differences(now, dict(before), ""):
        subject = _WHAT.get(name, f"the {name}")
        raise RunDirectoryError(
            f"{subject} changed since the run began, though the experiment did not: "
            "restore the original to resume, or start a new run in another --out"
        )


def _mechanism_bytes(plan: PrivacyPlan) -> bytes:
    return repr((plan.release, plan.delta, plan.target_epsilon, plan.secure_noise)).encode()


def _sha256(parts: Iterable[bytes]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


_PACKAGES = ("torch", "flwr", "numpy", "scipy", "pydantic", "scikit-learn", "safetensors", "ray")


def describe_environment(*, seed: int) -> dict[str, object]:
    """Return the content of `environment.json`: versions, platform, seed and commit of fedsim.

    Versions and commit are read once in a process, since the code of a process does not change.
    """
    return {
        "fedsim": fedsim.__version__,
        "schema": SCHEMAS["environment.json"],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
        "seed": seed,
        "commit": _commit(Path(fedsim.__file__).resolve().parent.parent),
    }


@cache
def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _commit(directory: Path) -> str | None:
    """Return the commit of the checkout that fedsim runs from; None for an installed fedsim."""
    if not (directory / ".git").exists():
        return None
    options = ("--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    command = ("git", "-C", str(directory), "describe", *options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
