"""Local training only: each client trains a personal model without the other clients."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.algorithm import ClientRule, NoOptions, Sent
from fedsim.algorithms.built_in.mr_mtl import MrMtl
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedsim.algorithms.state import Arrays, ServerState


class LocalOnly(MrMtl):
    """Baseline without collaboration: MR-MTL with λ = 0, so no pull towards the mean model.

    Rounds, steps and privacy charges are the same as if the clients trained together. A client that
    trains alone would need no privacy against a server. With `privacy`, clients still add noise and
    are charged, so the models have the same noise as in a federation and may be published.
    """

    name: ClassVar[str] = "local_only"
    description: ClassVar[str] = "each client trains a model of its own, alone: a baseline"
    Options: ClassVar[type[Settings]] = NoOptions
    wire: ClassVar[tuple[Sent, ...]] = ()

    def client(self) -> ClientRule | None:
        """Return None, because no rule changes the gradients of local steps."""
        return None

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return an empty dictionary: a client gets no arrays beside its personal model."""
        return {}
