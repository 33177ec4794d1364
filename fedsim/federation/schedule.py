"""The public terms of each client: its privacy settings, its rounds and its local steps.

They follow from settings, public client sizes and the seed. So every party computes the same terms,
and a client's charges can be planned before the first round.

A federation of 100,000 clients has few distinct settings, plans and ledgers. A tuple of references
to shared objects takes 8 bytes per client; separate objects would take a kilobyte.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.mechanisms.dp_sgd.draft import whole_round_steps
from fedsim.clients.mechanisms.plan import PrivacyPlanError, delta_of
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.streams import Purpose, stream
from fedsim.experiment import Experiment, ExperimentWithClients
from fedsim.server.participation.participation import Participation

T = TypeVar("T")
Table = Mapping[int, OwnPrivacySettings]  # client → its line of a csv file

_CLIENTS_OVER_COUNT_NOISE = 20.0


def map_shared(function: Callable[..., T], *values: Sequence[Any]) -> Iterator[T]:
    """Yield the result of `function` for each position of the sequences.

    The function is called once for values that several positions share. Objects count as shared if
    they are identical, numbers and texts if they are equal. So large objects are never compared,
    and the function is called again for equal objects that are not identical.

    Args:
        function: function of one value from each sequence. Equal values must give equal results.
        values: sequences of equal length. Iterators are not allowed, because sequences keep objects
            alive.

    Raises:
        ValueError: the sequences have different lengths.
    """
    known: dict[tuple[object, ...], T] = {}
    for place in zip(*values, strict=True):
        key = tuple([_key(value) for value in place])
        if key not in known:
            known[key] = function(*place)
        yield known[key]


def _key(value: object) -> object:
    kind = type(value)
    # The key has the type, as 1 == 1.0 == True, and a float's text, as 0.0 == -0.0 and nan != nan.
    if kind is float:
        return kind, repr(value)
    return (kind, value) if kind is int or kind is str or kind is bool else id(value)


@dataclass(frozen=True)
class ClientPrivacy:
    """Privacy settings of one client, with the group that they come from.

    Attributes:
        privacy: the client's settings.
        group: name of the client's group in `privacy.clients`, or None if it is in no group.
    """

    privacy: PrivacySettings
    group: str | None = None


def resolve_client_privacy(
    privacy: PrivacySettings,
    *,
    num_clients: int,
    seed: int,
    tables: Mapping[str, Table],
    clients_per_round: int | None = None,
) -> tuple[ClientPrivacy, ...]:
    """Return the privacy settings of all clients, from client 0 on.

    The entry of a single client overrides the entry of its group, which overrides the settings of
    all clients. A group may be given by its `share` of the clients. Its members are then drawn from
    the clients that no other entry names, one group after the other. The draw depends on the seed
    alone.

    Args:
        privacy: the `privacy` section.
        num_clients: number of clients in the federation.
        seed: seed of the experiment.
        tables: for each entry of `privacy.clients` that names a csv file, the lines of that file.
        clients_per_round: number of clients in a round; None stands for all clients.

    Returns:
        The settings of each client, in ascending order of client numbers.

    Raises:
        PrivacyPlanError: an entry names a client that does not exist, a client is in two groups,
            or the shares need more clients than are left.
    """
    groups = _Groups(num_clients)
    for name, entry in privacy.clients.items():
        if entry.members is not None:
            groups.add(name, entry.members)
        elif entry.csv is not None:
            groups.add(name, tables[name])
    singles = {int(name) for name in privacy.clients if is_client(name)}
    groups.check_exist("clients", singles)
    _draw_shares(groups, privacy.clients, singles, seed)
    if privacy.release_kind.protects_client:
        privacy = _of_clients(privacy, num_clients, clients_per_round or num_clients)
    # Members of a group that no entry names singly share one object.
    shared = {
        name: ClientPrivacy(_own(privacy, None, name, {}), name)
        for name in {None, *groups.of.values()}
        if name not in tables
    }
    return tuple(
        ClientPrivacy(_own(privacy, client, name, tables), name)
        if name not in shared or client in singles
        else shared[name]
        for client in range(num_clients)
        for name in (groups.of.get(client),)
    )


def _of_clients(privacy: PrivacySettings, num_clients: int, per_round: int) -> PrivacySettings:
    """Return the settings with the defaults that depend on the number of clients filled in."""
    defaults = {"delta": delta_of(privacy, num_clients)}
    if privacy.clipping.name == "adaptive" and privacy.clipping.count_noise is None:
        # Andrew et al. 2021, section 3.1: σ_b = clients of a round / 20 hardly costs anything.
        noise = per_round / _CLIENTS_OVER_COUNT_NOISE
        privacy = privacy.with_choice("clipping", count_noise=noise)
    return privacy.model_copy(update=defaults)


class _Groups:
    """The group of each client, by name."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.of: dict[int, str] = {}

    def add(self, name: str, members: "list[int] | Table") -> None:
        self.check_exist(f"clients.{name}", members)
        for client in members:
            other = self.of.setdefault(client, name)
            if other != name:
                raise PrivacyPlanError(
                    f"privacy.clients: client {client} is in the groups {other!r} and {name!r}; "
                    "list it in one of them; settings for one client go into an entry named by "
                    "its number"
                )

    def check_exist(self, where: str, clients: "set[int] | list[int] | Table") -> None:
        missing = sorted(client for client in clients if client >= self.num_clients)
        if missing:
            raise PrivacyPlanError(
                f"privacy.{where}: there is no client {missing[0]}; they are 0 to "
                f"{self.num_clients - 1} (data.partition.num_clients is {self.num_clients})"
            )


def _draw_shares(
    groups: _Groups, entries: Mapping[str, ClientPrivacySettings], singles: set[int], seed: int
) -> None:
    free = [
        client for client in range(groups.num_clients) if client not in singles | groups.of.keys()
    ]
    drawn = [int(client) for client in stream(seed, Purpose.SHARES).permutation(free)]
    for name, entry in entries.items():
        if entry.share is None:
            continue
        wanted = round(entry.share * groups.num_clients)
        if wanted > len(drawn):
            raise PrivacyPlanError(
                f"privacy.clients.{name}: a share of {entry.share:g} is {wanted} of "
                f"{groups.num_clients} clients, but only {len(drawn)} are in no other entry; "
                "lower the shares"
            )
        members, drawn = drawn[:wanted], drawn[wanted:]
        groups.add(name, members)


def _own(
    privacy: PrivacySettings, client: int | None, group: str | None, tables: Mapping[str, Table]
) -> PrivacySettings:
    """Return the settings of a client, or those of its group if `client` is None."""
    resolved = privacy
    if group is not None:
        resolved = resolved.with_own(privacy.clients[group].changes)
        if group in tables and client is not None:
            resolved = resolved.with_own(tables[group][client])
    single = None if client is None else privacy.clients.get(str(client))
    return resolved if single is None else resolved.with_own(single.changes)


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
