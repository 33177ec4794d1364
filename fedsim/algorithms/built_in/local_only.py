"""Local training only: each client trains a personal model without the other clients."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.algorithm import ClientRule, Sent
from fedsim.algorithms.built_in.mr_mtl import MrMtl
from fedsim.algorithms.settings import NoOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedsim.algorithms.state import Arrays, ServerState


class LocalOnly(MrMtl):
    """Baseline without collaboration: MR-MTL with λ = 0, so no pull towards the mean model.

    Rounds, steps and charges are those of a federation. A client that trains alone would need no
    privacy against a server. Because clients are charged, the models have the same noise as in a
    federation and may be published.
    """

    name: ClassVar[str] = "local_only"
    description: ClassVar[str] = "each client trains a model of its own, alone: a baseline"
    Options: ClassVar[type[Settings]] = NoOptions
    wire: ClassVar[tuple[Sent, ...]] = ()

    def client(self) -> ClientRule | None:
        """Return None, because local steps are plain."""
        return None

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return no arrays beside the client's model."""
        return {}
