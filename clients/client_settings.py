"""Settings of single clients: their privacy settings, and injected faults.

Each entry of `privacy.clients` is named by a client's number or by a name for a group. A group
lists its `members`, takes a `share` of all clients, or reads a `csv` file with one line per client.
"""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS, MAX_SECONDS
from fedsim.core.settings import Probability, Settings, Share

ClientNumber = Annotated[int, Field(ge=0, lt=MAX_CLIENTS)]
OwnSetting = Literal[
    "target_epsilon", "noise_multiplier", "delta", "max_grad_norm", "sampling_rate"
]


class OwnPrivacySettings(Settings):
    """Privacy settings of one client; null stands for the setting that all clients share."""

    target_epsilon: float | None = Field(
        default=None, gt=0, description="budget ε, never exceeded; sets the noise if none is given"
    )
    noise_multiplier: float | None = Field(
        default=None, ge=0, description="noise multiplier of the client"
    )
    delta: Probability | None = Field(default=None, description="δ of the client")
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="L2 bound C of the client's per-example gradients"
    )
    sampling_rate: Share | None = Field(
        default=None, description="expected share of the client's examples in a batch"
    )


class ClientPrivacySettings(OwnPrivacySettings):
    """One entry of `privacy.clients`: privacy settings of a client or of a group of clients."""

    members: list[ClientNumber] | None = Field(
        default=None, min_length=1, description="the group's clients"
    )
    share: Share | None = Field(
        default=None,
        description="size of the group as a share of all clients; its members are drawn by the "
        "seed among the clients that no entry names",
    )
    csv: str | None = Field(
        default=None, description="file.csv with a column `client`, relative to the experiment file"
    )
    columns: dict[OwnSetting, str] = Field(
        default={}, description="which column of the csv file holds which setting"
    )

    @property
    def changes(self) -> OwnPrivacySettings:
        """Privacy settings of this `privacy.clients` entry, without the keys that name clients."""
        return OwnPrivacySettings.model_validate(
            {name: getattr(self, name) for name in OwnPrivacySettings.model_fields}
        )

    @property
    def noise_keys(self) -> list[str]:
        """Which of target_epsilon and noise_multiplier a `privacy.clients` entry or csv sets."""
        keys = ("target_epsilon", "noise_multiplier")
        return [key for key in keys if getattr(self, key) is not None or key in self.columns]

    def check(self, name: str) -> None:
        """Check that this entry of `privacy.clients` selects clients in exactly one way.

        An entry named by a client number has no `members`, `share` or `csv`. Any other entry has
        exactly one of these keys.

        Args:
            name: name of the entry in `privacy.clients`.

        Raises:
            ValueError: the entry breaks this rule.
        """
        ways = {"members": self.members, "share": self.share, "csv": self.csv}
        given = [key for key, value in ways.items() if value is not None]
        if is_client(name):
            if given:
                raise ValueError(
                    f"clients: {name!r} is the number of a client and takes no {given[0]}; give "
                    "the group a name, such as 'careful'"
                )
        elif len(given) != 1:
            keys = " and ".join(given) or "none"
            raise ValueError(
                f"clients: {name!r} is not a client number ('0', '1', ...), so it names a group: "
                f"it needs exactly one of members, share and csv, got {keys}"
            )

    @model_validator(mode="after")
    def _table(self) -> Self:
        if (self.csv is None) != (not self.columns):
            raise ValueError(
                "csv and columns need each other: csv: budgets.csv, columns: {target_epsilon: "
                "epsilon}"
            )
        given = [name for name in self.columns if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{given[0]} comes from a column of the csv file already")
        return self

    @model_validator(mode="after")
    def _members_once(self) -> Self:
        members = self.members or []
        repeated = sorted(client for client, times in Counter(members).items() if times > 1)
        if repeated:
            raise ValueError(f"members names client {repeated[0]} more than once")
        return self


def is_client(name: str) -> bool:
    """Return whether the name of an entry of `privacy.clients` is a client number."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


FaultKind = Literal[
    "dropout_before",
    "dropout_during",
    "dropout_after",
    "straggler",
    "error",
    "nan",
    "inf",
    "wrong_shape",
    "empty",
]


class FaultSettings(Settings):
    """One entry of `faults:` in an experiment file: a failure to inject into clients."""

    kind: FaultKind = Field(description="kind of failure")
    clients: list[ClientNumber] | None = Field(
        default=None, min_length=1, description="clients that fail; null: all clients"
    )
    rounds: list[Annotated[int, Field(ge=1, le=MAX_ROUNDS)]] | None = Field(
        default=None, min_length=1, description="rounds in which they fail; null: all rounds"
    )
    probability: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="probability of the failure, drawn independently for each client and round",
    )
    delay: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        description="simulated seconds by which a straggler's reply is late",
    )

    @model_validator(mode="after")
    def _delay_of_stragglers(self) -> Self:
        if (self.kind == "straggler") != (self.delay is not None):
            raise ValueError(
                f"kind straggler, and no other, has a delay in seconds; got kind {self.kind} "
                f"with delay {self.delay}"
            )
        return self
