"""Federated evaluation: clients evaluate the global model on their own examples.

The examples never leave the clients; only metrics are sent.

A metric is computed from private examples, and nothing bounds what it reveals about them. So
federated evaluation is for runs without differential privacy; with it, clients refuse to evaluate.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedsim.core.streams import Purpose, stream
from fedsim.protocol.errors import ProtocolError
from fedsim.protocol.messages import EvaluateReply, EvaluateRequest
from fedsim.protocol.traffic import ClientError, exchange
from fedsim.server.settings import EvaluationSettings


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a model on the clients' held-out examples.

    Attributes:
        clients: the numbers of the clients whose metrics are averaged, ascending.
        examples: the total number of held-out examples of these clients.
        metrics: each metric's average over these examples, by name; empty if there are no examples.
        failed: the reason, for each client that was asked but sent no usable metrics.
    """

    clients: tuple[int, ...] = ()
    examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientEvaluation:
    """Federated evaluation: in some rounds, clients evaluate the global model and send metrics.

    Guarantee: the choice of clients depends on the seed and the round alone. The averages do not
    depend on the order of the replies.

    Args:
        settings: how often clients evaluate, and how many clients do so.
        seed: the experiment's seed.
        rounds: the number of rounds of the federation; the last round is always evaluated.
        deadline: simulated seconds after which a reply is too late; None for no deadline.
    """

    settings: EvaluationSettings
    seed: int
    rounds: int
    deadline: float | None = None

    def clients(self, round_number: int, num_clients: int) -> tuple[int, ...]:
        """Return the clients to ask in a round, ascending; empty if the round has no evaluation.

        All clients are asked, unless `settings.clients` is set: then that many, drawn at random.
        """
        if round_number % self.settings.every_rounds and round_number != self.rounds:
            return ()
        wanted = self.settings.clients
        if wanted is None or wanted >= num_clients:
            return tuple(range(num_clients))
        generator = stream(self.seed, Purpose.EVALUATION, round_number=round_number)
        return tuple(sorted(generator.choice(num_clients, wanted, replace=False).tolist()))

    def run(
        self,
        round_number: int,
        arrays: ArrayRecord,
        nodes: Mapping[int, int],
        grid: Grid,
        timeout: float,
    ) -> EvaluationResult | None:
        """Let clients evaluate a round's model and return the averaged metrics.

        The result is None if the round has no evaluation.

        Args:
            round_number: the round, from 1.
            arrays: the global model after the round.
            nodes: the node id of each client, by client number.
            grid: Flower's grid, which sends the requests.
            timeout: the longest time to wait for the replies, in seconds.
        """
        request = EvaluateRequest(round_number, arrays)
        asked = self.clients(round_number, len(nodes))
        requests = {client: request.to_message(nodes[client]) for client in asked}
        return self.averaged(exchange(grid, requests, timeout=timeout)) if requests else None

    def averaged(self, answers: Iterable[tuple[int, Message | ClientError]]) -> EvaluationResult:
        """Return the means of the clients' metrics, weighted by the clients' numbers of examples.

        A client without held-out examples is left out of the means and is not counted as failed.

        Args:
            answers: pairs of client number and answer, for all clients asked, in any order.
        """
        replies: dict[int, EvaluateReply] = {}
        failed: dict[int, str] = {}
        for client, answer in answers:
            try:
                replies[client] = self._read(answer)
            except ProtocolError as error:
                failed[client] = str(error)
        scored = {client: replies[client] for client in sorted(replies) if replies[client].examples}
        names = next((list(reply.metrics) for reply in scored.values()), [])
        for client in [c for c, reply in scored.items() if list(reply.metrics) != names]:
            failed[client] = (
                f"reports the metrics {list(scored.pop(client).metrics)}, other clients {names}"
            )
        total = sum(reply.examples for reply in scored.values())
        return EvaluationResult(
            clients=tuple(scored),
            examples=total,
            metrics={
                name: _mean(
                    [(reply.examples, reply.metrics[name]) for reply in scored.values()], total
                )
                for name in names
            },
            failed=dict(sorted(failed.items())),
        )

    def _read(self, answer: Message | ClientError) -> EvaluateReply:
        if isinstance(answer, ClientError):
            raise ProtocolError(answer.reason)
        reply = EvaluateReply.from_message(answer)
        if self.deadline is not None and reply.delay > self.deadline:
            raise ProtocolError(
                f"answered after {reply.delay:g} s, past the deadline of {self.deadline:g} s"
            )
        return reply


def _mean(weighted: Iterable[tuple[int, float]], total: int) -> float:
    """Return the weighted mean, correctly rounded and so independent of the order of values."""
    terms = [weight * value for weight, value in weighted]
    if not all(map(math.isfinite, terms)):
        return math.nan
    return math.fsum(terms) / total
