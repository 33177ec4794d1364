"""Rules between the keys of an experiment file, with one module for each part of the file.

A rule is a function `check_...` that yields (path, message) for each mistake. It runs if all
sections that it reads are valid (`Sections`), even if other sections have mistakes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION
from fedsim.clients.privacy_settings import (
    BoundedExamplesSettings,
    GradientPerturbationSettings,
    PrivacySettings,
)
from fedsim.data.settings import DataSettings
from fedsim.experiment.errors import KeyPath
from fedsim.experiment.schema import Experiment
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import RuntimeSettings
from fedsim.zeroth_order.settings import ZerothOrderSettings

RoundSizes = tuple[int, int]
"""(fewest, most) clients of a non-empty round; expected numbers under Poisson sampling."""


@dataclass(frozen=True)
class Sections:
    """The valid sections of an experiment; a section is None if it is absent, null or has mistakes.

    Attributes:
        base: the directory that relative paths refer to.
        mistaken: names of the sections with mistakes.
        unit: the privacy unit, `privacy.unit` in the file, even if `privacy` has mistakes.
    """

    base: Path
    data: DataSettings | None = None
    model: ModelSettings | None = None
    federation: FederationSettings | None = None
    local: LocalSettings | None = None
    privacy: PrivacySettings | None = None
    secure_aggregation: SecureAggregationSettings | None = None
    evaluation: EvaluationSettings | None = None
    personalization: PersonalizationSettings | None = None
    task: str = "federated"
    pate: PateSettings | None = None
    faults: Sequence[FaultSettings] = ()
    runtime: RuntimeSettings | None = None
    mistaken: Collection[str] = ()
    unit: object = None

    @classmethod
    def of(cls, valid: Mapping[str, Any], base: Path, *, unit: object = None) -> "Sections":
        """Return the sections of an experiment.

        Args:
            valid: the valid sections by name.
            base: the directory that relative paths refer to.
            unit: `privacy.unit` as written in the file.
        """
        known = {field.name: valid[field.name] for field in fields(cls) if field.name in valid}
        return cls(base, **known, mistaken=Experiment.model_fields.keys() - valid.keys(), unit=unit)

    @property
    def num_clients(self) -> int | None:
        """Number of clients; None if the file does not give it."""
        return None if self.data is None else self.data.partition.num_clients

    @property
    def perturbation(self) -> GradientPerturbationSettings | BoundedExamplesSettings | None:
        """The mechanism without noisy gradients; None without privacy or with noisy gradients."""
        chosen = None if self.privacy is None else self.privacy.mechanism
        return None if chosen is None or chosen.name == GRADIENT_PERTURBATION else chosen

    @property
    def zeroth_order(self) -> ZerothOrderSettings | None:
        """The settings of zeroth-order steps; None without them."""
        return None if self.local is None else self.local.zeroth_order

    @property
    def is_pate(self) -> bool | None:
        """Whether `task` is pate; None in a file without a word about PATE."""
        return self.task == "pate" if self.task == "pate" or self.pate is not None else None

    @cached_property
    def round_sizes(self) -> RoundSizes | None:
        """Smallest and largest number of clients in a round that has clients; None if unknown."""
        if self.federation is None:
            return None
        partial = self.federation.partial_work
        drops = partial is not None and partial.on_partial == "drop"
        if self.federation.participation.scheme in ("uniform", "poisson") and not drops:
            drawn = self.federation.clients_per_round or self.num_clients
            return None if drawn is None else (drawn, drawn)
        if self.num_clients is None:
            return None
        # Imported here: numpy is slow to import, and most files do not need it.
        from fedsim.server.participation.participation import Participation

        return Participation.of(self.federation, num_clients=self.num_clients, seed=0).round_sizes


def example_keys_of_clients(privacy: PrivacySettings) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path of a client or group, key) for each key in it that acts on examples."""
    for name, entry in privacy.clients.items():
        for key in ("max_grad_norm", "sampling_rate"):
            if getattr(entry, key) is not None or key in entry.columns:
                yield ("privacy", "clients", name), key
