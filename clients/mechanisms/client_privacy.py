"""Privacy settings of every client, resolved from the entries of `privacy.clients`."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings, is_client
from fedsim.clients.mechanisms.plan import PrivacyPlanError, delta_of
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.streams import Purpose, stream

Table = Mapping[int, OwnPrivacySettings]  # client → its line of a csv file


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
    single = privacy.clients.get(str(client))
    return resolved if single is None else resolved.with_own(single.changes)


_CLIENTS_OVER_COUNT_NOISE = 20.0
