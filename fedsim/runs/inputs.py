"""Digests of a run's inputs: a run resumes from the same inputs, or not at all.

An experiment file names data, plug-ins and tables by path, and those files may change. A resumed
run with other data would keep charges for examples that it no longer trains on.
"""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.core.shared_values import map_shared
from fedsim.data import Examples
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest
from fedsim.runs.directory import RunDirectoryError
from fedsim.runs.private_digest import have_one_key, key_path, private_digest

_WHAT = {
    "data": "the data, or how they are divided among the clients,",
    "test": "the targets of the test set",
    "model": "the initial model",
    "privacy": "a client's noise, δ or target",
}


def fingerprint(federation: Federation) -> dict[str, str]:
    """Return the digests of the data, the initial model, the mechanisms and the plug-ins' sources.

    That of the data is keyed: whoever has the run directory can test no guess of an example. The
    targets of the test set have a digest of their own: runs whose scores are compared share them.
    The number of planned rounds is not part of them.
    """
    data = federation.data
    examples = chain([data.test], data.clients, data.held_out or ())
    return {
        "data": private_digest(part for each in examples for part in _arrays_of(each)),
        "test": _sha256([*_array_bytes(data.test.targets)]),
        "model": digest(federation.initial_arrays()),
        "privacy": _sha256(map_shared(_mechanism_bytes, federation.plan.clients or ())),
        **federation.sources.entries,
    }


def refuse_other_inputs(before: Mapping[str, str], federation: Federation) -> None:
    """Check that a run resumes with the inputs that it began with.

    Args:
        before: the digests in `checkpoint/inputs.json`.
        federation: the federation to resume.

    Raises:
        RunDirectoryError: an input differs; the message names it.
    """
    now = fingerprint(federation)
    if not have_one_key(before.get("data", ""), now["data"]):
        raise RunDirectoryError(
            f"the digest of the data was made with another key than {key_path()}, so nobody can "
            "tell whether the data are the same: resume where the run began, copy its key here, "
            "or start a new run in another --out"
        )
    for name in [*now, *(name for name in before if name not in now)]:
        if before.get(name) != now.get(name):
            what = _WHAT.get(name, f"the {name}")
            raise RunDirectoryError(
                f"{what} changed since the run began, though the experiment did not: "
                "restore the original to resume, or start a new run in another --out"
            )


def _mechanism_bytes(plan: PrivacyPlan) -> bytes:
    return repr((plan.release, plan.delta, plan.target_epsilon, plan.secure_noise)).encode()


def _arrays_of(examples: Examples) -> Iterable[np.ndarray]:
    return examples.features, examples.targets


def _array_bytes(array: np.ndarray) -> Iterable[bytes]:
    yield f"{array.dtype}{array.shape}".encode()
    yield array.tobytes()


def _sha256(parts: Iterable[bytes]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()
