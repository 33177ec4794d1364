"""The content of `privacy.json`: the privacy spend of clients, and facts on secure aggregation.

`clients.csv` and the report show the same figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import fedsim
from fedsim.accountant import PrivacyLedger
from fedsim.accountant.accountants import renyi_choice
from fedsim.accountant.sampler_slack import Slack, sampler_slack
from fedsim.accountant.trust import Trust
from fedsim.algorithms.state import ServerState
from fedsim.clients.account import Accounts
from fedsim.clients.mechanisms.plan import Accounting
from fedsim.core.formatting import count_text
from fedsim.core.text_formats import finite_or_none, json_value
from fedsim.federation.federation import Federation
from fedsim.protocol.client_spend import ClientSpend
from fedsim.protocol.noisy_sums import AdaptiveClipNorm
from fedsim.runs.files import SCHEMAS
from fedsim.runs.recorded_terms import client_terms, recorded_terms
from fedsim.server.client_ledgers import ClientLedgers
from fedsim.server.round_report import RoundRow, withdrawal_rounds
from fedsim.statement import read_facts, to_json
from fedsim.statement.facts import spread_of
from fedsim.statement.guarantee import guarantee_words
from fedsim.statement.privacy_file import PrivacyFile, ledger_digest

if TYPE_CHECKING:
    from fedsim.clients.secure.channel import SecureChannel


@dataclass(frozen=True, kw_only=True)
class ClientSummary(ClientSpend):
    """The privacy spend of one client, with the values of the client's row in `privacy.json`.

    Attributes:
        epsilon: ε at the client's δ, by the run's accountant; ∞ for a client without noise.
        epsilon_rdp: ε at the client's δ by Rényi DP, at the orders α that the run uses.
        terms: the values of the row that follow from the settings (see `client_terms`).
        withdrawn_round: round in which the client withdrew; None for a client that stayed.
        clip_norm: adaptive clip norm at the end of the run (a tuple if each group of parameters has
            its own); None if the clip norm is fixed.
        epsilon_against_server: ε of `against_server`, which is empty before the first charge; both
            are None unless trust is distributed.
        name: public name of the client; None for a client that has only a number.
    """

    epsilon: float
    epsilon_rdp: float
    terms: Mapping[str, Any]
    withdrawn_round: int | None = None
    clip_norm: AdaptiveClipNorm | None = None
    epsilon_against_server: float | None = None
    name: str | None = None


@dataclass(frozen=True, repr=False)
class PrivacySummary:
    """The privacy spend of all clients, and the guarantee of the whole federation."""

    clients: tuple[ClientSummary, ...]  # by ascending client number
    content: PrivacyFile  # of `privacy.json`

    @property
    def system_epsilon(self) -> float:
        """The federation's ε: the largest ε of any client, never an average."""
        return max(spend.epsilon for spend in self.clients)

    @property
    def epsilon_statistics(self) -> dict[str, float | None]:
        """The largest, median and smallest ε of the clients, by the names max, median and min.

        Only the largest ε is a guarantee. An infinite ε is None.
        """
        return json_value(spread_of([spend.epsilon for spend in self.clients]))

    @cached_property
    def guarantee(self) -> str:
        """The federation's privacy guarantee in a few words, or the reason why there is none."""
        return guarantee_words(read_facts(self.content))

    def __repr__(self) -> str:
        return f"PrivacySummary({count_text(len(self.clients), 'client')}: {self.guarantee})"

    @property
    def statement(self) -> str:
        """The main sentences of the privacy statement, to quote beside an ε."""
        return self.content["statement"]

    def to_json(self) -> PrivacyFile:
        """Return the content of `privacy.json`; an infinite ε is null."""
        return self.content


def privacy_file(
    federation: Federation, spends: Sequence[ClientSummary], secure: Mapping[str, Any] | None
) -> PrivacyFile:
    """Return the content of `privacy.json` with its statement, in words and in figures.

    `spends` is empty without differential privacy; `secure` is the value of `secure_aggregation`.
    """
    terms = recorded_terms(federation.experiment)
    epsilon = max((spend.epsilon for spend in spends), default=math.inf)
    slack = None
    if math.isfinite(epsilon):
        # Of all clients together: the slack grows with ε, and with a smaller δ.
        pairs = {(spend.epsilon, spend.delta) for spend in spends}
        most = map(max, zip(*(sampler_slack(*pair) for pair in pairs), strict=True))
        slack = Slack(*most)._asdict()
    clients = [_client_row(spend, terms["trust"]) for spend in spends] or _not_private(federation)
    content = {
        "schema": SCHEMAS["privacy.json"],
        "version": fedsim.__version__,
        "private": math.isfinite(epsilon),
        **terms,
        "system_epsilon": finite_or_none(epsilon),
        "slack": slack,
        "ledger_digest": ledger_digest(clients) if spends else None,
        "secure_aggregation": secure,
    }
    statement = to_json(read_facts({**content, "clients": clients}))
    # Clients are last, so that a reader of the file meets the words first.
    return cast(PrivacyFile, {**content, **statement, "clients": clients})


def _not_private(federation: Federation) -> list[dict[str, Any]]:
    """Return the rows of clients that train without differential privacy."""
    names = federation.data.client_names
    return [
        {
            "client": client,
            **({} if names is None else {"name": names[client]}),
            "examples": size,
            "epsilon": None,
            "ledger": [],
        }
        for client, size in enumerate(federation.data.clients.sizes)
    ]


def summarise_privacy(
    federation: Federation, rows: Sequence[RoundRow], state: ServerState
) -> tuple[ClientSummary, ...]:
    """Return every client's privacy spend from the durable ledger; empty without privacy.

    The ledger counts every charge, even if the update never arrived at the server.

    Raises:
        JournalError: the ledger was changed.
        ValueError: the federation is private and has no ledger.
    """
    settings, plan, journal = federation.experiment.privacy, federation.plan, federation.journal
    if settings is None or plan.clients is None or plan.client_privacy is None:
        return ()
    if journal is None:
        raise ValueError("a private federation needs a ledger to summarise")
    # Read from disk, not from the memory of the run: a ledger that was changed is refused.
    names, account_of = federation.data.client_names, Accounts(journal).of
    spends = [account_of(client, own).spend for client, own in enumerate(plan.clients)]
    renyi = ClientLedgers(renyi_choice(settings.accounting), settings.adjacency.name)
    for spend in spends:
        renyi.record(spend)
    by_rdp, withdrawn = renyi.epsilons(), withdrawal_rounds(rows)
    clients: list[ClientSummary] = []
    for spend, terms, planned in zip(spends, plan.client_privacy, plan.clients, strict=True):
        client = spend.client
        norm = state.clip_norms.get(client, planned.release.adapted_clip_norm)
        second = spend.against_server
        if settings.trust.name == "distributed" and spend.rounds == 0:
            second = PrivacyLedger()
        # Each client's own accountant makes a run's ε equal to its plan's, to the last digit.
        accounting = Accounting.of(settings, spend.delta)
        against_server = None if second is None else accounting.epsilon(second.entries)
        clients.append(
            ClientSummary(
                **{**vars(spend), "against_server": second},
                epsilon=accounting.epsilon(spend.ledger.entries),
                epsilon_rdp=by_rdp[client],
                terms=client_terms(terms, planned, norm),
                withdrawn_round=withdrawn.get(client),
                clip_norm=norm,
                epsilon_against_server=against_server,
                name=None if names is None else names[client],
            )
        )
    return tuple(clients)


def _client_row(spend: ClientSummary, trust: Trust) -> dict[str, Any]:
    row: dict[str, Any] = {
        "client": spend.client,
        **({} if spend.name is None else {"name": spend.name}),
        **spend.terms,
        "epsilon": finite_or_none(spend.epsilon),
        "epsilon_rdp": finite_or_none(spend.epsilon_rdp),
        "noise_multiplier": spend.noise_multiplier,
        "rounds": spend.rounds,
        "steps": spend.steps,
        "withdrawn_round": spend.withdrawn_round,
        "ledger": spend.ledger.to_list(),
        "ledger_head": spend.head,
    }
    if trust == "distributed":
        second = spend.against_server
        row["epsilon_against_server"] = finite_or_none(spend.epsilon_against_server)
        row["ledger_against_server"] = None if second is None else second.to_list()
    return row


_ENCODING = (
    *("ring_bits", "frac_bits", "value_bound", "max_weight", "max_clients", "guard_bits"),
    *("rounding", "max_abs_error"),
)
_TRUST = {
    "additive": "at least one of the server and the helpers follows the protocol and colludes with "
    "no other of them",
    "secagg": "the server follows the protocol and colludes with fewer clients than the threshold",
    "secagg_plus": "the server follows the protocol; corrupt and dropped clients stay within the "
    "configured fractions",
    "quantized": "none: the server sees every update (for comparison only)",
}


def secure_facts(
    federation: Federation, rows: Sequence[Mapping[str, Any]], *, one_operator: bool
) -> dict[str, Any] | None:
    """Return the value of `secure_aggregation` in `privacy.json`; None without secure aggregation.

    With `one_operator`, one simulation ran all parties, so that nothing kept them from colluding.
    """
    channel, plan = federation.secure, federation.plan
    if channel is None:
        return None
    settings, encoder = channel.settings, channel.codec.encoder
    rounds = {row["round"]: row["secure_aggregation"] for row in rows}
    hidden = settings.protocol.name != "quantized"
    # The uploads of an aborted round stay charged, as they were sent.
    aborted = {k: row["aborted"] for k, row in rounds.items() if row["aborted"] is not None}
    finished = sorted(k for k, row in rounds.items() if row["survivors"] and k not in aborted)
    seen = ["every update", "every weight", *(f"every {name}" for name in settings.metrics)]
    if hidden:
        sums = (f"sum of weighted {name}" for name in settings.metrics)
        seen = ["sum of weighted updates", "sum of weights", *sums]
    return {
        "protocol": settings.protocol.name,
        "implementation": "fedsim.secagg 1",
        "parties": {
            "leader": "server",
            "helpers": settings.helpers,
            "clients_sampled": plan.participation.round_sizes[1],
            "survivors_per_round": [rounds[key]["survivors"] for key in finished],
        },
        "trust": _trust(federation, channel, one_operator=one_operator),
        "simulated_non_collusion": one_operator,
        "server_view": [*seen, "participant ids", "timings"],
        "encoding": {name: getattr(encoder, name) for name in _ENCODING},
        "exactness": "equals quantised plain averaging bit for bit",
        **({"plan_digest": plan.digest} if plan.digest else {}),
        "prg": settings.prg if hidden else None,
        "envelope": "RFC 9180 X25519/HKDF-SHA256/AES-256-GCM" if hidden else None,
        "rounds": {
            "completed": len(finished),
            "aborted": len(aborted),
            "retried": sum(row["retried"] for row in rounds.values()),
            "reasons": {str(key): aborted[key] for key in sorted(aborted)},
        },
        "clipped": sum(row["clipped"] for row in rounds.values()),
    }


def _trust(
    federation: Federation, channel: "SecureChannel", *, one_operator: bool
) -> dict[str, Any]:
    """Return who must be trusted, and which conditions hold against an active server, by name.

    Reference: docs/explain/secure_aggregation.md, "An active server".
    """
    settings, privacy = channel.settings, federation.experiment.privacy
    name, keys = settings.protocol.name, settings.keys
    forged = "refused" if keys.client_fingerprints else "undetected"
    # A simulation with seeded noise stands for secure noise, and its server is honest.
    repeats_noise = not one_operator and (privacy is None or privacy.noise != "secure")
    # Integers have their noise already, so no client is left out because of its values.
    is_fixed = channel.codec.is_integers or settings.encoding.range_policy == "clip"
    return {
        "privacy_requires": _TRUST[name],
        "active_server": "pinned_helper_keys" if keys.helper_fingerprints else "not_covered",
        "malicious_clients": "undetected",
        "conditions": {
            "pinned_keys": bool(keys.helper_fingerprints and keys.client_fingerprints),
            "opened_once": name == "additive" and not repeats_noise,
            "agreed_plan": name == "additive" and bool(federation.plan.digest),
            "fixed_set": name == "additive" and is_fixed,
        },
        "forged_clients": "not_needed" if name == "quantized" else forged,
    }
