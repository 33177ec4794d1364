"""The public facts of `task: federated`; `PateSettings` answers the same questions for its task."""

from collections.abc import Mapping
from typing import Any

from fedsim.clients.local_settings import LocalSettings
from fedsim.core.formatting import count_text


class FederatedTask:
    """Rounds of local training that make a global model.

    Attributes:
        saves_derived_model: whether the saved model is made from the values that travel.
        votes: what `privacy.json` says of votes: there are none.
    """

    saves_derived_model = False
    votes: Mapping[str, Any] | None = None

    def ballots(self, rounds: int) -> None:
        """Return the ballots of a run: it has none."""

    def work(self, rounds: int, local: LocalSettings) -> str:
        """Return what a run does, for its headline: rounds, and the steps or passes of each.

        Args:
            rounds: of the run.
            local: the training of a round.
        """
        if local.epochs is None:
            length = count_text(local.given_steps, "step")
        else:
            length = f"{local.epochs:g} epoch{'' if local.epochs == 1 else 's'}"
        return f"{count_text(rounds, 'round')} of {length}"
