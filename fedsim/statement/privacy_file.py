"""The content of `privacy.json` as types, for its writer and its readers."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.events import Adjacency
from fedsim.accountant.trust import Observer


class LedgerEntry(TypedDict):
    """One entry of a client's ledger: an event as JSON, and how often it was released."""

    event: dict[str, Any]
    count: int


class ClientRow(TypedDict):
    """One client of any federation; `epsilon` is null where there is no bound.

    `name` is public, and absent where clients have numbers alone.
    `examples` is null where the unit is the client.
    """

    client: int
    name: NotRequired[str]
    examples: int | None
    epsilon: float | None
    ledger: list[LedgerEntry]


class PrivateClientRow(ClientRow):
    """One client of a federation with differential privacy.

    `epsilon` and `ledger` are of the claimed view, that of `against`. In distributed trust
    `epsilon_against_server` and `ledger_against_server` are those against a server that sees the
    client's own uploads.
    """

    epsilon_against_server: NotRequired[float | None]
    ledger_against_server: NotRequired[list[LedgerEntry] | None]
    against: NotRequired[Observer]
    max_update_norm: NotRequired[float | None]
    group_clip_norms: NotRequired[list[float]]

    delta: float
    epsilon_rdp: float | None
    target_epsilon: float | None
    noise_multiplier: float
    sampling_rate: float
    max_grad_norm: float | None
    rounds: int
    steps: int
    group: str | None
    withdrawn_round: int | None
    clip_norm: float | None
    ledger_head: str


class Certificate(TypedDict):
    """ε at δ of every client against one observer; ε is null where none is supported."""

    against: Observer
    epsilon: float | None
    delta: float


class PrivacyFile(TypedDict):
    """The whole file; names are null in a federation without differential privacy."""

    sums: NotRequired[Mapping[str, Any]]
    participation: NotRequired[Mapping[str, Any]]
    weighting: NotRequired[str]
    mechanism: NotRequired[Mapping[str, Any]]
    noise_correlation: NotRequired[Mapping[str, Any]]
    public_parts: NotRequired[Mapping[str, Any]]
    orders: NotRequired[list[float]]

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
    clients: list[ClientRow]
