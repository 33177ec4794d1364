"""What rules ask of a schedule. Apart from the rules, as numpy is slow to import."""

from fedsim.server.participation.participation import Participation, groups_of
from fedsim.server.participation.schedules import TraceSchedule
from fedsim.server.participation.settings import CyclicParticipation, TraceParticipation
from fedsim.server.settings import FederationSettings


def sizes_of_rounds(federation: FederationSettings, num_clients: int) -> tuple[int, int]:
    """Return the fewest clients of a round that has any, and the most; (0, 0) without any.

    Args:
        federation: the `federation` section.
        num_clients: clients of the federation.
    """
    return Participation.of(federation, num_clients=num_clients, seed=0).round_sizes


def first_difference(settings: CyclicParticipation, num_clients: int) -> str | None:
    """Return how groups that are written out differ from the clients; None where they do not.

    Args:
        settings: the groups.
        num_clients: clients of the federation.
    """
    members = {client for group in groups_of(settings, num_clients) for client in group}
    known = set(range(num_clients))
    if members - known:
        return (
            f"name client {min(members - known)}, and clients are 0 to {num_clients - 1} "
            "(data.partition.num_clients); remove it"
        )
    if known - members:
        return f"client {min(known - members)} is in no group; add it to one"
    return None


def unknown_client(settings: TraceParticipation, num_clients: int) -> int | None:
    """Return the first client of a trace that does not exist, or None.

    Args:
        settings: the trace.
        num_clients: clients of the federation.
    """
    named = TraceSchedule(0, num_clients, num_clients, settings.availability or "").clients
    return min((client for client in named if client >= num_clients), default=None)
