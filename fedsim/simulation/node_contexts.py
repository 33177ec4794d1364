"""Contexts of simulated nodes, made when a node gets its first message.

A context is half a kilobyte of Python objects. Of 100,000 clients, of which a round asks 1,000,
most get their first message late or never.
"""

from collections.abc import Iterable, Iterator, Mapping

from flwr.app import Context, RecordDict

FIRST_NODE = 1000


class NodeContexts(Mapping[int, Context]):
    """The contexts of some nodes by node id, which is `FIRST_NODE + partition`.

    Pickled, it takes along the contexts that exist; the others are made on the other side.

    Args:
        partitions: numbers of the nodes, in the order of iteration.
        num_nodes: number of nodes of the federation.
        run_id: Flower's id of the run.
    """

    def __init__(self, partitions: Iterable[int], *, num_nodes: int, run_id: int) -> None:
        self._made: dict[int, Context] = {}
        own = partitions if isinstance(partitions, range) else tuple(partitions)
        self._partitions: range | frozenset[int] = own if isinstance(own, range) else frozenset(own)
        self._order = own
        self._num_nodes, self._run_id = num_nodes, run_id

    @property
    def partitions(self) -> range | tuple[int, ...]:
        """Numbers of the nodes."""
        return self._order

    def __getitem__(self, node: int) -> Context:
        """Return the context of a node, always the same object.

        Raises:
            KeyError: no such node is here.
        """
        if node not in self._made:
            if node not in self:
                raise KeyError(node)
            self._made[node] = Context(
                run_id=self._run_id,
                node_id=node,
                node_config={
                    "partition-id": node - FIRST_NODE,
                    "num-partitions": self._num_nodes,
                },
                state=RecordDict(),
                run_config={},
            )
        return self._made[node]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node - FIRST_NODE in self._partitions

    def __iter__(self) -> Iterator[int]:
        return (FIRST_NODE + partition for partition in self._order)

    def __len__(self) -> int:
        return len(self._order)
