"""Record of a helper's released sums on the disk of its node: one sum of a round, ever.

The state of a helper in Flower's context can be lost, or be older than its last answer. Two
processes can start from the same state. The record is none of these: it is one file for each run,
`STATE/helper-NUMBER/SHA-256-OF-THE-RUN.json`, changed by one process at a time and on disk before
the sum leaves. It holds no key: a helper that was restarted has a new sealing key and opens no
earlier envelope.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from fedsim.deployment.errors import DeploymentError
from fedsim.deployment.private_files import exclusive, private_directory, refuse_open, write_whole
from fedsim.secagg.errors import AlreadyAnsweredError, ReplayError, SecureAggregationError
from fedsim.server.secure.helper import Release


def record_release(state: Path, helper: int, release: Release) -> None:
    """Write a release to the disk of a helper's node, unless it contradicts an earlier one.

    Guarantee: of all releases of one run for which this returns, those of one round have the same
    question, and rounds never go back, also across processes, crashes and restarts.

    Args:
        state: the node's state directory.
        helper: number of the helper, ≥ 1.
        release: the sum that the helper is about to release.

    Raises:
        AlreadyAnsweredError: another sum of the round was released.
        ReplayError: a sum of a later round was released.
        SecureAggregationError: the record cannot be read or written; no sum may leave then.
    """
    directory = state / f"helper-{helper}"
    path = directory / f"{hashlib.sha256(release.run_id.encode()).hexdigest()}.json"
    try:
        private_directory(state)
        private_directory(directory)
        with exclusive(directory):
            if path.exists():
                refuse_open(path, "600")
                _check(release, _read(path), path)
            write_whole(path, json.dumps(asdict(release)))
    except (DeploymentError, OSError) as error:
        raise SecureAggregationError(
            f"helper {helper} cannot record the release, so it sends no sum: {error}",
            round_number=release.server_round,
        ) from error


def _read(path: Path) -> Release:
    try:
        content = json.loads(path.read_bytes())
        return Release(
            str(content["run_id"]), int(content["server_round"]), str(content["question"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DeploymentError(
            f"{path} is damaged, so a second sum of a round could not be noticed: start a new run, "
            "and keep the file"
        ) from error


def _check(release: Release, last: Release, path: Path) -> None:
    if release.server_round < last.server_round:
        raise ReplayError(
            f"{path} records a released sum of round {last.server_round}, and earlier rounds are "
            "refused; continue with a later round",
            round_number=release.server_round,
        )
    if release.server_round == last.server_round and release.question != last.question:
        raise AlreadyAnsweredError(
            f"{path} records another released sum of this round; a second one would reveal single "
            "updates. Continue with a later round",
            round_number=release.server_round,
        )
