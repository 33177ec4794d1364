"""The public schedule of an experiment: the rounds and the local steps of each client.

The schedule follows from settings, public client sizes and the seed. So every party computes the
same schedule, and a client's charges can be planned before the first round.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fedsim.clients.mechanisms.client_privacy import ClientPrivacy
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.core.shared_values import map_shared
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.server.participation.participation import Participation


def participation_of(experiment: ExperimentWithClients) -> Participation:
    """Return the rule of an experiment that chooses the clients of each round."""
    privacy = experiment.privacy
    return Participation.of(
        experiment.federation,
        num_clients=experiment.num_clients,
        seed=experiment.seed,
        private=privacy is not None,
        secure_noise=privacy is not None and privacy.noise == "secure",
    )


@dataclass(frozen=True)
class StepSchedule:
    """The planned number of local steps of each client in each round.

    Training, privacy plans, charges, reports and `fedsim verify` all use this schedule.

    Guarantee: the numbers of steps are a function of settings, public sizes and the seed. They do
    not depend on the value of any example.

    Attributes:
        participation: the rule that chooses the clients of each round.
        whole_rounds: the number of local steps of each client in a round, unless the client is a
            straggler, which takes fewer.
        releases_updates: whether a round is one release of a whole update, which is charged as one
            step.
    """

    participation: Participation
    whole_rounds: tuple[int, ...]
    releases_updates: bool = False
    _taken: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        participation: Participation,
        terms: Sequence[ClientPrivacy] | None,
        sizes: Sequence[int],
    ) -> "StepSchedule":
        """Return the schedule of an experiment.

        Args:
            experiment: the settings.
            participation: the rule that chooses the clients of each round.
            terms: the privacy settings of each client; None without privacy.
            sizes: the number of examples of each client; used only where it is public.

        Raises:
            PrivacyPlanError: `local.epochs` give more than the largest number of steps.
        """
        local = experiment.local
        private = (
            [None] * len(sizes)
            if terms is None
            else [client_terms.privacy for client_terms in terms]
        )
        steps = map_shared(
            lambda privacy, size: whole_round_steps(privacy, local, size), private, sizes
        )
        whole = experiment.privacy is not None and not experiment.release_kind.draws_batches
        return cls(participation, tuple(steps), releases_updates=whole)

    def local_steps(self, client: int, round_number: int) -> int:
        """Return the planned number of local steps of a client in a round.

        Args:
            client: the client's number.
            round_number: the round, ≥ 1.
        """
        whole, participation = self.whole_rounds[client], self.participation
        if client in participation.stragglers_in(round_number):
            return participation.stragglers.steps(client, round_number, whole)
        return whole

    def charged_steps(self, client: int, round_number: int) -> int:
        """Return the number of steps charged to a client for a round; a whole update counts as one.

        Args:
            client: the client's number.
            round_number: the round, ≥ 1.
        """
        return 1 if self.releases_updates else self.local_steps(client, round_number)

    def steps_after(self, client: int, rounds: int) -> int:
        """Return the number of steps charged to a client for its first `rounds` scheduled rounds.

        Args:
            client: the client's number.
            rounds: the number of rounds. If there are more than scheduled, each further round
                counts with all of its steps.
        """
        taken = self._taken_after(client)
        known = min(rounds, len(taken) - 1)
        return taken[known] + (rounds - known) * self._steps_of_whole_round(client)

    def _steps_of_whole_round(self, client: int) -> int:
        """Return the charged steps of a client in a whole round."""
        return 1 if self.releases_updates else self.whole_rounds[client]

    def _taken_after(self, client: int) -> tuple[int, ...]:
        """Return a client's charged steps after 0, 1, ... rounds; (0,) if all rounds are whole."""
        if self.releases_updates or self.participation.partial_work is None:
            return (0,)
        if client not in self._taken:
            rounds = self.participation.rounds_of(client)
            steps = (self.local_steps(client, number) for number in rounds)
            self._taken[client] = tuple(accumulate(steps, initial=0))
        return self._taken[client]

    def planned(self) -> tuple[int, ...]:
        """Return the number of charged steps of each client over all of its scheduled rounds."""
        rounds = self.participation.planned_rounds()
        return tuple(self.steps_after(client, count) for client, count in enumerate(rounds))

    def whole_rounds_in(self, client: int, steps: int) -> int:
        """Return how many rounds a client has completed when `steps` steps have been charged.

        Args:
            client: the client's number.
            steps: the number of charged steps since the start of the client's first round.
        """
        taken = self._taken_after(client)
        known = bisect_right(taken, steps) - 1
        if known < len(taken) - 1:
            return known
        return known + (steps - taken[-1]) // self._steps_of_whole_round(client)

    def rounds_in(self, client: int, steps: int) -> int:
        """Return how many rounds a client has begun when `steps` steps have been charged.

        Args:
            client: the client's number.
            steps: the number of charged steps since the start of the client's first round.
        """
        taken = self._taken_after(client)
        if steps <= taken[-1]:
            return bisect_left(taken, steps)
        return len(taken) - 1 - (taken[-1] - steps) // self._steps_of_whole_round(client)
