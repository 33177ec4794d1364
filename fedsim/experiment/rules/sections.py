"""The sections of an experiment file that its rules read, and messages that several rules share."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.data.settings import DataSettings
from fedsim.experiment.errors import KeyPath, value_text
from fedsim.experiment.messages import PathMessage
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import RuntimeSettings


@dataclass(frozen=True)
class Sections:
    """The valid sections of a file; None for a section with mistakes.

    Those with a default of None are also None if the file has no such section, and so is `privacy`.
    `mistaken` names the sections with mistakes.
    """

    data: DataSettings | None
    model: ModelSettings | None
    federation: FederationSettings | None
    privacy: PrivacySettings | None
    local: LocalSettings | None = None
    faults: tuple[FaultSettings, ...] = ()
    secure_aggregation: SecureAggregationSettings | None = None
    evaluation: EvaluationSettings | None = None
    personalization: PersonalizationSettings | None = None
    runtime: RuntimeSettings | None = None
    task: str = "federated"
    pate: PateSettings | None = None
    unit: object = None  # as it is written, also in a `privacy` with mistakes
    mistaken: frozenset[object] = frozenset()

    @property
    def num_clients(self) -> int | None:
        """Number of clients; None where only the data know it."""
        return None if self.data is None else self.data.partition.num_clients

    @cached_property
    def round_sizes(self) -> tuple[int, int] | None:
        """The fewest clients of a round that has any, and the most; None where they are not known.

        With Poisson draws, twice their expected number.
        """
        if self.federation is None or self.num_clients is None:
            drawn = None if self.federation is None else self.federation.clients_per_round
            return None if drawn is None else (drawn, drawn)
        partial = self.federation.partial_work
        drops = partial is not None and partial.on_partial == "drop"
        if self.federation.participation.scheme in ("uniform", "poisson") and not drops:
            drawn = self.federation.clients_per_round or self.num_clients
            return drawn, drawn
        # Imported here: numpy is slow to import, and most files do not need it.
        from fedsim.experiment.rules.schedules import sizes_of_rounds

        return sizes_of_rounds(self.federation, self.num_clients)


def finite_messages(value: object, path: KeyPath) -> Iterator[PathMessage]:
    """Yield a message for every infinite number and NaN in free-form arguments."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value_text(value)}"
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, item in children:
        yield from finite_messages(item, (*path, key))


def messages_at(path: KeyPath, message: str | None) -> Iterator[PathMessage]:
    """Yield a message with its place, if there is one.

    Args:
        path: the keys that lead to the place.
        message: the message; None: there is no mistake.
    """
    if message is not None:
        yield path, message
