"""The content of `privacy.json` as types: for the code that writes it and the code that reads it.

Files of older runs may lack keys that came later, so readers use `get` for them.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from fedsim.accountant.accountants import AccountantName
from fedsim.accountant.adjacency import Adjacency


class LedgerEntry(TypedDict):
    """One entry of a client's ledger: an event as JSON, and how often it was released."""

    event: dict[str, Any]
    count: int


class ClientRow(TypedDict):
    """One client of any federation; `epsilon` is null where there is no bound."""

    client: int
    examples: int
    epsilon: float | None
    ledger: list[LedgerEntry]


class PrivateClientRow(ClientRow):
    """One client of a federation with differential privacy."""

    delta: float
    epsilon_rdp: float | None
    target_epsilon: float | None
    noise_multiplier: float
    sampling_rate: float
    max_grad_norm: float
    rounds: int
    steps: int
    group: str | None
    withdrawn_round: int | None
    clip_norm: float | None
    ledger_head: str


class PrivacyFile(TypedDict):
    """The whole file; names are null in a federation without differential privacy."""

    noise_correlation: NotRequired[Mapping[str, Any]]
    public_parts: NotRequired[Mapping[str, Any]]

    schema: int
    version: str
    private: bool
    unit: str
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
