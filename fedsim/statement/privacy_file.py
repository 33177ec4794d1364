"""Typed form of the file `privacy.json`, and a reader that returns the facts it records."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from fedsim.accountant import PrivacyLedger, zcdp_rho
from fedsim.accountant.accountants import AccountantName, choose_accountant
from fedsim.accountant.attack_bound import Profile
from fedsim.accountant.events import Adjacency
from fedsim.accountant.sampler_slack import Slack
from fedsim.accountant.trust import Observer, is_explained_by_shares
from fedsim.clients.mechanisms.conditions import ADJACENCIES
from fedsim.statement.attack import AttackBound, attack_bound, profile_of
from fedsim.statement.facts import ACCOUNTANTS, ClientFacts, Facts, MechanismFacts, RunFacts
from fedsim.statement.trust_facts import TrustFacts


class Certificate(TypedDict):
    """A pair (ε, δ) that holds for all clients against one adversary."""

    against: Observer
    epsilon: float | None  # null if the recorded facts do not support it
    delta: float


class PrivacyFile(TypedDict):
    """The content of `privacy.json`; without privacy, its settings are null, and rows are short.

    In a client's row, `epsilon` and `ledger` hold against the adversary that `against` names. In
    distributed trust, `epsilon_against_server` and `ledger_against_server` hold against a server
    that sees the client's single uploads. An ε is null if it is not finite. An entry of a ledger is
    an `event` as JSON, and the `count` of its charges.
    """

    sums: NotRequired[Mapping[str, Any]]
    participation: NotRequired[Mapping[str, Any]]
    votes: NotRequired[Mapping[str, float]]
    weighting: NotRequired[str]
    mechanism: NotRequired[Mapping[str, Any]]
    noise_correlation: NotRequired[Mapping[str, Any]]
    public_parts: NotRequired[Mapping[str, Any]]
    orders: NotRequired[list[float]]
    target_rho: NotRequired[float]
    schema: int
    version: str
    private: bool
    trust: str
    unit: str
    certificates: list[Certificate]
    adjacency: Adjacency | None
    accountant: AccountantName | None
    sampling: str | None
    clipping: str | None
    noise: str | None
    system_epsilon: float | None
    slack: dict[str, float] | None
    ledger_digest: str | None
    secure_aggregation: Mapping[str, Any] | None
    personal_models: str | None
    statement: str
    statement_points: list[dict[str, Any]]
    profile: dict[str, Any] | None
    attack: dict[str, list[float]] | None
    clients: list[dict[str, Any]]


_CHOICES = ("adjacency", "accountant", "noise", "sampling", "clipping")
_OF_SUMS = ("min_clients", "colluding_clients", "local_steps", "optimizer")
_SAME = (
    *("delta", "noise_multiplier", "sampling_rate", "rounds", "steps"),
    *("target_epsilon", "withdrawn_round"),
)


def read_facts(privacy: Mapping[str, Any], *, run: RunFacts | None = None) -> Facts:
    """Return the facts that the content of `privacy.json` records.

    The ε of the federation is taken from the clients, not from `system_epsilon`. The profile δ(ε)
    is computed again from the ledger of the client with the largest ε. The bound on attacks is read
    from `attack`; if this key is absent, it is computed from all ledgers. The texts of the
    statement are ignored. `run` tells how the run ended, by its other files.

    Raises:
        KeyError: a key is missing.
    """
    mechanism = MechanismFacts()
    if privacy["accountant"] is not None:
        slack, orders = privacy["slack"], privacy.get("orders")
        mechanism = MechanismFacts(
            **{name: privacy[name] for name in _CHOICES},
            slack=None if slack is None else Slack(slack["epsilon"], slack["delta"]),
            orders=None if orders is None else tuple(orders),
            noise_correlation=privacy.get("noise_correlation"),
            off_gradients=privacy.get("mechanism"),
            target_rho=privacy.get("target_rho"),
        )
    rows: list[dict[str, Any]] = privacy["clients"]
    trust = _trust(privacy)
    # ρ is in the statement only of noise that is correlated, or calibrated to a ρ.
    has_rho = mechanism.target_rho is not None or mechanism.noise_correlation is not None
    adjacency = privacy["adjacency"] if has_rho else None
    profile, attack = _bounds(privacy, mechanism)
    return Facts(
        clients=tuple(_client(row, adjacency) for row in rows),
        mechanism=mechanism,
        trust=trust,
        against_server=_against_server(privacy, run) if trust.trust == "distributed" else None,
        profile=profile,
        attack=attack,
        digest=ledger_digest(rows) if mechanism.accountant else None,
        version=privacy["version"],
        secure_aggregation=privacy["secure_aggregation"],
        personal_models=privacy["personal_models"],
        public_parts=privacy.get("public_parts"),
        run=run or RunFacts(),
    )


def _trust(privacy: Mapping[str, Any]) -> TrustFacts:
    sums, drawn = privacy.get("sums") or {}, privacy.get("participation") or {}
    trust = TrustFacts(
        trust=privacy["trust"],
        unit=privacy["unit"],
        **{name: sums.get(name) for name in _OF_SUMS},
        participation_rate=drawn.get("rate"),
        weighting=privacy.get("weighting"),
        votes=privacy.get("votes"),
    )
    if trust.trust != "distributed" or trust.honest_clients < 1:
        return trust
    return replace(trust, unexplained=_unexplained(privacy["clients"], trust.honest_clients))


def _unexplained(rows: Sequence[Mapping[str, Any]], honest: int) -> int | None:
    """Return the first client whose ε needs more noise than `honest` shares have; None if none."""
    explained = set[str]()  # many clients have equal ledgers
    for row in rows:
        ledgers = row["ledger"], row.get("ledger_against_server") or []
        if (text := json.dumps(ledgers, sort_keys=True)) not in explained:
            claimed, share = (PrivacyLedger.from_list(ledger) for ledger in ledgers)
            if not is_explained_by_shares(claimed, share, honest=honest):
                return row["client"]
            explained.add(text)
    return None


def _against_server(privacy: Mapping[str, Any], run: RunFacts | None) -> Facts | None:
    """Return the facts against a server that sees single uploads: shares of noise in local trust.

    The result is None if a client has no ledger against the server.
    """
    rows: list[dict[str, Any]] = []
    for row in privacy["clients"]:
        epsilon, ledger = row.get("epsilon_against_server"), row.get("ledger_against_server")
        if ledger is None:
            return None
        rows.append({**row, "epsilon": epsilon, "ledger": ledger, "target_epsilon": None})
    return read_facts({**privacy, "trust": "local", "clients": rows, "attack": None}, run=run)


def ledger_digest(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return one SHA-256 over all clients' ledgers; None if a client has no `ledger_head`.

    The hashed text has a line "<client> <ledger_head>" for each client, by client number, ended by
    a newline, so that `sha256sum` computes the same digest.
    """
    heads = sorted((row["client"], row.get("ledger_head")) for row in rows)
    if any(head is None for _, head in heads):
        return None
    lines = "".join(f"{client} {head}\n" for client, head in heads)
    return hashlib.sha256(lines.encode()).hexdigest()


def _client(row: Mapping[str, Any], adjacency: Adjacency | None) -> ClientFacts:
    """Return the facts in a client's row; with ρ if the adjacency of its events is given."""
    ledger = [(entry["event"], entry["count"]) for entry in row["ledger"]]
    is_one_event = [(event["type"], count) for event, count in ledger] == [("SelfComposed", 1)]
    # The events of one batch or epoch, also from inside the event of a whole run.
    batches = [event["event"] if event["type"] == "SelfComposed" else event for event, _ in ledger]
    is_gaussian = is_one_event and batches[0]["type"] == "Gaussian"
    return ClientFacts(
        client=row["client"],
        examples=row["examples"] or 0,
        epsilon=math.inf if row["epsilon"] is None else row["epsilon"],
        **{name: row[name] for name in _SAME if name in row},
        max_grad_norm=row.get("max_update_norm") or row.get("max_grad_norm"),
        events=frozenset(batch["type"] for batch in batches),
        is_one_event=is_one_event,
        run_noise=batches[0]["noise_multiplier"] if is_gaussian else None,
        is_joint=all(_is_joint(batch) for batch in batches),
        rho=math.inf if adjacency is None else _rho(row, adjacency),
    )


def _is_joint(batch: Mapping[str, Any]) -> bool:
    """Whether the event of a batch releases several parts that are accounted for together."""
    inner = batch.get("event", batch)
    return inner["type"] == "JointGaussian" and len(inner["noise_multipliers"]) > 1


def _rho(row: Mapping[str, Any], adjacency: Adjacency) -> float:
    """Return ρ of zCDP of a client's releases; ∞ if none is known, or the ledger is unreadable."""
    try:
        return zcdp_rho(PrivacyLedger.from_list(row["ledger"]).entries, adjacency)
    except ValueError:
        return math.inf


def _bounds(
    privacy: Mapping[str, Any], mechanism: MechanismFacts
) -> tuple[Profile | None, AttackBound | None]:
    """Return the profile of the client with the largest ε, and the bound on attacks.

    Both are None if an ε is infinite or not known. The profile is None, too, without a charge.
    """
    rows, accountant, adjacency = privacy["clients"], mechanism.accountant, mechanism.adjacency
    if accountant not in ACCOUNTANTS or adjacency not in ADJACENCIES or not rows:
        return None, None
    has_wrong_orders = mechanism.orders is not None and accountant != "rdp"
    if has_wrong_orders or any(row["epsilon"] is None for row in rows):
        return None, None
    method = choose_accountant(accountant, mechanism.orders)
    worst = max(rows, key=lambda row: row["epsilon"])
    profile = profile_of(worst, method, adjacency) if worst["ledger"] else None
    if "attack" in privacy:
        return profile, AttackBound.from_json(privacy["attack"])
    return profile, attack_bound(rows, accountant=method, adjacency=adjacency)
