"""Worker processes of Ray that serve one run after another: each takes seconds to import torch.

The tests of the engine itself, beside this file, start new processes as users do.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray import cloudpickle
from ray.exceptions import RayError

from fedsim.simulation.engine import NodeContexts, ShardableApp
from fedsim.simulation.ray import engine
from fedsim.simulation.ray.host import ClientHost
from fedsim.simulation.ray.pool import Worker


class KeptHost:
    """A process that has a `ClientHost` for each run in turn."""

    def begin(self, *arguments: Any) -> None:
        """Set the arguments of the next host."""
        self._arguments = arguments

    def versions(self) -> dict[str, str]:
        """Make the host, whose errors are those of a start, and return its versions."""
        self._host = ClientHost(*self._arguments)
        return self._host.versions()

    def answer(self, *arguments: Any) -> Iterator[Any]:
        """Answer as the host."""
        yield from self._host.answer(*arguments)

    def end(self) -> None:
        """Forget the host and what was frozen for it."""
        del self._host, self._arguments
        gc.unfreeze()


class KeptWorkers:
    """Idle processes of the engines `ray` and `flower`, each of which has half the processors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._of_ray, self._of_flower = list[Any](), list[Any]()
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        patch.setattr(engine, "_worker", self._worker)
        patch.setattr(BasicActorPool, "add_actors_to_pool", lambda *given: self._fill(*given))
        patch.setattr(BasicActorPool, "terminate_all_actors", lambda pool: self._empty(pool))

    def _worker(
        self,
        number: int,
        share: Sequence[int],
        num_nodes: int,
        clients: ShardableApp,
        journal_actor: Any,
        gpus: float,
    ) -> Worker:
        host: Any = ray.remote(KeptHost).options(num_cpus=1, num_gpus=gpus)

        def make_actor(recorded: NodeContexts) -> Any:
            actor = self._of_ray.pop() if self._of_ray else host.remote()
            actor.begin.remote(clients.shard(share), recorded, journal_actor)
            return actor

        worker = _KeptWorker(number, NodeContexts(share, num_nodes=num_nodes), make_actor)
        worker.idle = self._of_ray
        return worker

    def _fill(self, pool: BasicActorPool, number: int) -> None:
        while len(self._of_flower) < number // 2:
            self._of_flower.append(pool.create_actor_fn())
        pool.pool, self._of_flower = self._of_flower, []
        pool.num_actors = len(pool.pool)

    def _empty(self, pool: BasicActorPool) -> None:
        at_work: list[Any] = [*pool._future_to_actor.values()]  # for an interrupted run
        for actor in at_work:
            ray.kill(actor)
        self._of_flower = pool.pool


class _KeptWorker(Worker):
    idle: list[Any]

    def stop(self) -> None:
        if self.actor is None:
            return
        try:
            ray.get(self.actor.end.remote(), timeout=20.0)
            self.idle.append(self.actor)
        except RayError:  # it is dead, or did not start
            ray.kill(self.actor)
        self.actor = None
