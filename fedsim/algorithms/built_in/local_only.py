"""Each client trains a model of its own and learns nothing from the others."""

from typing import TYPE_CHECKING, ClassVar

from fedsim.algorithms.algorithm import ClientRule, Sent
from fedsim.algorithms.built_in.mr_mtl import MrMtl
from fedsim.algorithms.settings import NoOptions
from fedsim.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedsim.algorithms.state import Arrays, ServerState


class LocalOnly(MrMtl):
    """MR-MTL with λ = 0: the baseline of a federation, with the same rounds, steps and charges.

    Its charges are those of a client that uploads. Alone on its own machine a client would need no
    privacy from a server; the charges compare equal noise, and allow the model to be published.
    """

    name: ClassVar[str] = "local_only"
    description: ClassVar[str] = "each client trains a model of its own, alone: a baseline"
    Options: ClassVar[type[Settings]] = NoOptions
    wire: ClassVar[tuple[Sent, ...]] = ()

    def client(self) -> ClientRule | None:
        """Return None: steps are plain."""
        return None

    def send(self, state: "ServerState", client: int) -> "Mapping[str, Arrays]":
        """Return nothing beside the client's model."""
        return {}
