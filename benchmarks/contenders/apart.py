"""What a machine gives two workers: fedsim's local engine in two processes that share nothing."""

from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

from contenders.base import Contender, Work


class TwoApart(Contender):
    """Half of the clients in each of two processes, without a server between them.

    No answer leaves its process, and a round is over when the slower half is. How far this is from
    twice as fast is the machine's doing: shared memory, caches and clocks.
    """

    name = "fedsim, two processes apart"

    def prepare(self, work: Work) -> None:
        """Get ready for the first round; not timed."""
        context = get_context("spawn")
        halves = work.clients // 2, work.clients - work.clients // 2
        self._halves = []
        for clients in halves:
            ours, theirs = context.Pipe()
            target = context.Process(target=_half, args=(replace(work, clients=clients), theirs))
            target.start()
            self._halves.append((target, ours))
        for _, half in self._halves:
            half.recv()

    def round(self) -> None:
        """Do one round: both halves train, each averages its own."""
        for _, half in self._halves:
            half.send(True)
        for _, half in self._halves:
            half.recv()

    def close(self) -> None:
        """End both processes."""
        for process, half in self._halves:
            half.send(False)
            process.join()


def _half(work: Work, whole: Connection) -> None:
    """Be one process: do a round whenever one is wanted."""
    import torch

    from contenders.fedsim_engines import LocalEngine

    torch.set_num_threads(1)
    engine = LocalEngine()
    engine.prepare(work)
    whole.send(None)
    while whole.recv():
        engine.round()
        whole.send(None)
    engine.close()
