"""Checks of experiments, rounds and clients' privacy plans against a node's policy.

Each check raises a `PolicyRefusalError` for what a rule forbids. The message names the rule, its
value and the requested value. A refused request is not charged.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from flwr.app import Message, MessageType

from fedsim.accountant.trust import Trust
from fedsim.clients.account import ChargeRefusedError
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.data.file_names import TABLE_SUFFIXES, data_files
from fedsim.data.files import check_file
from fedsim.data.settings import FileDataset, FilesPartition, group_column
from fedsim.data.tables.dataset import open_table
from fedsim.experiment import Experiment, LoadedExperiment
from fedsim.planning.validation import find_footprint, plugin_digest
from fedsim.protocol.messages import TrainRequest
from fedsim.tools.deployment.data_ledger import suffices
from fedsim.tools.deployment.policy import NodePolicy

logger = logging.getLogger("flwr")

_ROUNDS = {MessageType.TRAIN, MessageType.EVALUATE}


class PolicyRefusalError(ChargeRefusedError):
    """Error of a request that the node's policy forbids; nothing was charged."""

    def __init__(self, rule: str) -> None:
        super().__init__(f"this node's policy refuses the request: {rule}")


def check_experiment(policy: NodePolicy, loaded: LoadedExperiment) -> None:
    """Check an experiment before any of its plug-ins is imported; a refusal names all rules."""
    rules = (_settings_rules, _plugin_rules, _file_rules)
    broken = [message for rule in rules for message in rule(policy, loaded)]
    if broken:
        raise PolicyRefusalError("; ".join(broken))


def check_round(experiment: Experiment, message: Message) -> None:
    """Check that a training request is for a round that the experiment has.

    A request that names no round raises a ProtocolError.
    """
    if message.metadata.message_type not in _ROUNDS:
        return
    asked, rounds = TrainRequest.from_message(message).round_number, experiment.federation.rounds
    if asked > rounds:
        raise PolicyRefusalError(
            f"it is for round {asked}, and {experiment.name!r} has federation.rounds: {rounds}"
        )


def check_plan(policy: NodePolicy, plan: PrivacyPlan, *, trust: Trust, digest: str) -> None:
    """Check a client's noise multiplier, and this node's digest of all clients' privacy plans."""
    if policy.plan_digests is not None and digest not in policy.plan_digests:
        raise PolicyRefusalError(
            f"plan_digests lacks {digest}, the digest of the experiment's privacy plan: let the "
            "node's operator review the experiment and add the digest"
        )
    if policy.require_privacy and not plan.release.noise_multiplier:
        raise PolicyRefusalError(
            "require_privacy is true, and this client's noise multiplier would be 0, for which no "
            "ε holds: raise privacy.noise_multiplier, or set privacy.target_epsilon"
        )
    noise = (plan if suffices(policy.trust, trust) else plan.release).noise_multiplier
    least = policy.min_noise_multiplier
    if least is not None and noise < least:
        raise PolicyRefusalError(
            f"min_noise_multiplier is {least:g}, and this client's noise multiplier would be "
            f"{noise:g}: raise privacy.noise_multiplier, or lower privacy.target_epsilon"
        )


def _settings_rules(policy: NodePolicy, loaded: LoadedExperiment) -> Iterator[str]:
    experiment = loaded.experiment
    privacy, rounds = experiment.privacy, experiment.federation.rounds
    if policy.require_privacy and privacy is None:
        yield f"require_privacy is true, and {experiment.name!r} has privacy: null: set privacy"
    if policy.require_secure_noise and privacy is not None and privacy.noise != "secure":
        yield (
            f"require_secure_noise is true, and privacy.noise is {privacy.noise}: set "
            "privacy.noise: secure"
        )
    if experiment.not_deployed:
        yield experiment.not_deployed
    if policy.max_rounds is not None and rounds > policy.max_rounds:
        yield (
            f"max_rounds is {policy.max_rounds}, and federation.rounds is {rounds}: lower "
            f"federation.rounds to {policy.max_rounds}"
        )
    if privacy is not None:
        yield from _trust_rules(policy, privacy.trust.name, experiment)
    if policy.helpers is not None:
        yield from _helper_rules(policy.helpers, experiment)


def _trust_rules(policy: NodePolicy, trust: Trust, experiment: Experiment) -> Iterator[str]:
    if experiment.federation.participation.scheme == "poisson":
        yield (
            "the server charges all clients where it draws them in secret, and this node records "
            "its charges itself: set federation.participation.scheme to uniform"
        )
    if trust == "central" and not suffices(policy.trust, trust):
        yield (
            f"trust is {policy.trust}, and with privacy.trust: central the server gets sums of "
            "this client without noise: set privacy.trust to local or distributed"
        )
    secure = experiment.secure_aggregation
    pinned = secure.keys.client_fingerprints if secure else ()
    if trust == policy.trust == "distributed" and not pinned:
        yield (
            "trust is distributed, and without secure_aggregation.keys.client_fingerprints a "
            "server could make all other clients of a sum up: name the fingerprints of all clients "
            "there"
        )


def _helper_rules(allowed: tuple[str, ...], experiment: Experiment) -> Iterator[str]:
    settings = experiment.secure_aggregation
    if settings is None or not settings.helpers:
        yield (
            "helpers names the only helpers to which updates are sent, and the experiment has "
            "none: set secure_aggregation with protocol: additive and keys.helper_fingerprints"
        )
        return
    pinned = settings.keys.helper_fingerprints
    if not pinned:
        yield (
            "helpers pins keys, and secure_aggregation.keys.helper_fingerprints is empty: name the "
            "fingerprints of the helpers there"
        )
    for fingerprint in pinned:
        if fingerprint not in allowed:
            yield (
                f"helpers lacks {fingerprint} of secure_aggregation.keys.helper_fingerprints: use "
                "a helper that the policy names"
            )


def _plugin_rules(policy: NodePolicy, loaded: LoadedExperiment) -> Iterator[str]:
    digest = None if policy.plugin_digests is None else plugin_digest(loaded)
    if digest is not None and digest not in (policy.plugin_digests or ()):
        names = ", ".join(loaded.experiment.plugins)
        yield (
            f"plugin_digests lacks {digest}, the digest of {names}: use plug-ins that the policy "
            "names, or let the node's operator review them and add the digest"
        )


def _file_rules(policy: NodePolicy, loaded: LoadedExperiment) -> Iterator[str]:
    """Yield which files of the node must not be read; the app's files came from the server."""
    if isinstance(loaded.experiment.data.partition, FilesPartition):
        yield "data.partition.scheme: files reads whatever a pattern matches: use column"
        return
    allowed = {Path(name).resolve(): columns for name, columns in policy.files.items()}
    folder = loaded.experiment.data.folder  # also in the app: its README.md can name other files
    folders = () if folder is None else ((loaded.base / Path(folder).expanduser()).resolve(),)
    for path in dict.fromkeys((*find_footprint(loaded).outside, *folders)):
        columns = allowed.get(path)
        if columns is None:
            yield (
                f"files does not name {path}, which the experiment reads: let the node's operator "
                "add it"
            )
        elif columns != "all":
            yield from _column_rules(columns, path, loaded)


def _column_rules(allowed: Sequence[str], path: Path, loaded: LoadedExperiment) -> Iterator[str]:
    """Yield a message if used columns of a table are not in the policy; only the log names them."""
    data, suffix = loaded.experiment.data, path.suffix.lower()
    tables = {file.resolve() for file in data_files(data, loaded.base) if suffix in TABLE_SUFFIXES}
    if path not in tables or not isinstance(data.dataset, FileDataset):
        yield f"files lists columns of {path}, which the experiment does not read as a table"
        return
    check_file(path)
    dropped = {name for name, column in data.dataset.columns.items() if column == "drop"}
    used = {*open_table(path, data.dataset).names} - dropped
    used |= {data.dataset.target, group_column(data.partition) or data.dataset.target}
    if others := sorted(used - {*allowed}):
        logger.warning("files of this node's policy lacks columns of %s: %s", path, others)
        yield (
            f"the experiment uses columns of {path} that files does not list, as this node's log "
            "says: drop them in data.dataset.columns"
        )
