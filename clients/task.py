"""Task of a client: its data, the shared model, and the settings of its training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.algorithms.algorithm import ClientRule
from fedsim.clients.account import Accounts, request_digest
from fedsim.clients.faults import ClientFailureError, CoupledRowsError, FaultPlan, redact_error
from fedsim.clients.gradients.per_example import PerExampleGradients, PerExampleLoss
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.contract import Mechanism
from fedsim.clients.mechanisms.plan import PrivacyPlan
from fedsim.clients.model_checks.safety import UnsafeModelError
from fedsim.clients.training.shared_model import SharedModel
from fedsim.core.errors import FedsimError
from fedsim.core.plugin_errors import describe_error
from fedsim.core.streams import Purpose, stream_key
from fedsim.noise.sources import SeededNoise
from fedsim.protocol.arrays import digest
from fedsim.protocol.messages import TrainRequest

if TYPE_CHECKING:
    from fedsim.clients.secure.channel import SecureChannel

# From the arrays of a model to (number of held-out examples, metrics on them by name).
Evaluate = Callable[[ArrayRecord], tuple[int, Mapping[str, float]]]


class Voter(Protocol):
    """Interface of an object that labels PATE's public queries for all clients of a process.

    A client's labels come from the client's own model (its teacher, in PATE).
    """

    @property
    def classes(self) -> int:
        """Number of classes, which are the possible labels."""
        ...

    def labels(
        self,
        client: int,
        data: tuple[Tensor, Tensor],
        round_number: int,
        answers: Mapping[str, np.ndarray],
    ) -> NDArray[np.int64]:
        """Return a client's label for each row of a ballot; `NO_LABEL` means no vote.

        A ballot has one row for each query of a round, and maybe rows without a query.

        Guarantee: at most as many rows have a label as the round has queries.

        Args:
            client: number of the client.
            data: the client's features and targets (n, ...).
            round_number: the round, from 1.
            answers: public results of earlier rounds, arrays by name.
        """
        ...


class BlockShapes(Protocol):
    """Shapes of the padded batches of a block (clients that train together); all are public."""

    @property
    def places(self) -> int | None:
        """Number of slots in a padded batch, if any client may use any slot.

        A slot is a group of rows, all of one client. None if each client has a slot of its own.
        """
        ...

    def rows(self, members: Sequence[int]) -> int | None:
        """Return the planned number of rows that each client of a block has in a padded batch.

        A block is the clients that train together; the number is the same for all of them. If no
        number is planned, the result is None, and the clients that take part determine the number.

        Args:
            members: numbers of the clients that are planned for the block, ascending.
        """
        ...

    def check(self, members: Sequence[int]) -> None:
        """Check that no example of a block changes any bit of another example's gradient.

        A block is the clients that train together.

        Args:
            members: numbers of the clients that are planned for the block, ascending.

        Raises:
            UnsafeModelError: an example can change another one's gradient.
        """
        ...


@dataclass(frozen=True)
class LocalTraining:
    """Model, loss and settings of local training, shared by all clients of a process.

    Attributes:
        shared_model: the model object of the process; each request loads its values into it.
        loss: function of (outputs, targets) that returns one value per example.
        gradients: object that computes clipped sums of gradients of `loss`; None without privacy.
        local: settings of steps, batch size and optimizer.
        steps: function of (client, round) that returns the planned number of local steps.
        blocks: shapes of the padded batches of clients that train together.
        rule: rule by which the algorithm changes local steps; None for plain steps.
        sent: names of the arrays that the algorithm sends beside the model.
        voter: object that labels public queries; None if clients train instead.
        noisy_examples: noisy features and targets by client, under input perturbation. A client's
            entry is added when the client first trains.
    """

    shared_model: SharedModel
    loss: PerExampleLoss
    gradients: PerExampleGradients | None
    local: LocalSettings
    steps: Callable[[int, int], int]
    blocks: BlockShapes
    rule: ClientRule | None = None
    sent: tuple[str, ...] = ()
    voter: Voter | None = None
    noisy_examples: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientData:
    """The examples of a client.

    Attributes:
        size: number of examples.
        tensors: function that returns features and targets (n, ...). It is called when the client
            trains, so a waiting client holds no copy of its data.
        digest: function that returns a digest of the examples; the digest is private too.
    """

    size: int
    tensors: Callable[[], tuple[Tensor, Tensor]]
    digest: Callable[[], bytes]


@dataclass(frozen=True)
class ClientScores:
    """Functions that score models on a client's examples; the scores have no noise and no ε.

    Attributes:
        evaluate: function that scores a model on held-out examples; None if the client refuses.
        measure: function that returns, by name, the metrics that secure aggregation or the
            algorithm declares; None if none is declared.
    """

    evaluate: Evaluate | None = None
    measure: Callable[[nn.Module], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class RunTerms:
    """Seed and digests that all clients of a run share.

    Attributes:
        seed: the experiment's seed.
        conditions: digest of the settings, plug-in sources, versions and device of the run.
        plan_digest: digest of the privacy plan of all clients; "" without privacy.
    """

    seed: int
    conditions: str
    plan_digest: str = ""


@dataclass(frozen=True)
class ClientTask:
    """Everything that a client needs to answer a request.

    Attributes:
        client: number of the client.
        run: the seed and the digests of the run.
        data: the client's examples.
        training: model, loss and settings, shared by the clients of the process.
        privacy: the client's privacy plan; None if it trains without differential privacy.
        accounts: the privacy accounts of the clients of the process.
        weight: the client's planned weight in the mean; None if all clients have equal weights.
        secure: channel that encrypts updates for secure aggregation; None without it.
        scores: functions that score models on the client's examples.
        faults: the faults to inject.
    """

    client: int
    run: RunTerms
    data: ClientData
    training: LocalTraining
    privacy: PrivacyPlan | None
    accounts: Accounts
    weight: int | None = None
    secure: "SecureChannel | None" = None
    scores: ClientScores = ClientScores()
    faults: FaultPlan = field(default_factory=FaultPlan)

    def planned_steps(self, round_number: int) -> int:
        """Return the planned number of the client's local steps in a round."""
        return self.training.steps(self.client, round_number)

    def training_data(self, release: Mechanism | None) -> tuple[Tensor, Tensor]:
        """Return the features and targets (n, ...) on which the client trains.

        Under input perturbation, these examples are noisy.

        Guarantee: noisy examples are a single release. Their noise depends only on seed and client,
        so every process and every round gets the same bits from the same examples.

        Args:
            release: the client's privacy mechanism; None without privacy.
        """
        if release is None or not release.releases_examples:
            return self.data.tensors()
        known = self.training.noisy_examples
        if self.client not in known:
            key = stream_key(self.run.seed, Purpose.EXAMPLE_NOISE, client=self.client)
            known[self.client] = release.release_examples(*self.data.tensors(), SeededNoise(key))
        return known[self.client]

    def check_examples(self) -> None:
        """Check that the client has examples, and no more than its mechanism allows.

        If the client's number of examples is private, the client passes the check without
        examples, and releases noise alone.

        Raises:
            ClientFailureError: the client has no examples, or more than its mechanism allows.
        """
        if self.privacy is not None and self.privacy.release.protects_client:
            return
        if self.examples == 0:
            raise ClientFailureError("has no examples")
        most = None if self.privacy is None else self.privacy.release.most_examples
        if most is not None and self.data.size > most:
            raise ClientFailureError(
                f"may have {most:,} examples at most, for the rounding of its sums: declare a "
                "larger size (privacy.adjacency.declared_examples)"
            )

    def check_weight(self, request: TrainRequest) -> None:
        """Check that the aggregation weight in a request is the client's planned weight.

        Raises:
            ClientFailureError: the server planned another weight. Nothing is charged.
        """
        if request.weight != self.weight:
            requested, planned = (
                "equal weights" if weight is None else f"weight {weight:,}"
                for weight in (request.weight, self.weight)
            )
            raise ClientFailureError(
                f"refuses the request: the server plans {requested} and this client {planned} "
                "(federation.weighting); run the same experiment on the same data on both sides"
            )

    def check_sent(self, request: TrainRequest) -> None:
        """Check that a request holds the arrays that the algorithm declares, and no others.

        Raises:
            ClientFailureError: an array is missing or not declared. Nothing is charged.
        """
        if set(request.sent) != set(self.training.sent):
            received, declared = (
                ", ".join(sorted(names)) or "none" for names in (request.sent, self.training.sent)
            )
            raise ClientFailureError(
                f"refuses the request: the server sends the arrays {received} beside the model, "
                f"and federation.strategy of this client declares {declared}"
            )

    def release(self, request: TrainRequest) -> Mechanism | None:
        """Return the client's privacy mechanism with a request's clip norm; None without privacy.

        Guarantee: the mechanism has the planned privacy event, whatever the request says.

        Raises:
            ClientFailureError: the clip norm is not one that adaptive clipping can reach.
        """
        if self.privacy is None:
            return None
        try:
            return self.privacy.release.resume(request.clip_norm)
        except ValueError as error:
            raise ClientFailureError(f"refuses the request: {error}") from error

    def check_block(self, block: Sequence[int]) -> None:
        """Check that no example changes bits of another example's gradient in the client's block.

        A block is the clients that train together. Without privacy nothing is checked.

        Args:
            block: numbers of the clients that are planned for the block, ascending.

        Raises:
            CoupledRowsError: an example can change another's gradient; the message has the fix.
        """
        if self.privacy is None:
            return
        try:
            self.training.blocks.check(block)
        except UnsafeModelError as error:
            raise CoupledRowsError(str(error)) from error

    def request_digest(self, request: TrainRequest, block: tuple[int, ...], model: str) -> str:
        """Return the digest of everything on which the answer to a request depends.

        Args:
            request: the train request.
            block: numbers of the clients that are planned to train together, ascending.
            model: digest of the request's global model.
        """
        repeats = self.privacy is not None and not self.privacy.secure_noise
        return request_digest(
            seed=self.run.seed,
            client=self.client,
            block=block,
            padded_rows=self.training.blocks.rows(block),
            places=self.training.blocks.places,
            model=model,
            clip_norm=request.clip_norm,
            mechanism="" if self.privacy is None else self.privacy.mechanism_text,
            conditions=self.run.conditions,
            data=self.data.digest() if repeats else None,
            sent="".join(f"{name}={digest(array)}" for name, array in sorted(request.sent.items())),
        )

    def failure(self, error: Exception) -> Exception:
        """Return an error that may be sent to the server; with privacy, private text is removed."""
        if self.privacy is not None:
            return redact_error(error)
        known = isinstance(error, FedsimError)
        return error if known else ClientFailureError(describe_error(error))

    @property
    def examples(self) -> int:
        """Number of the client's examples: with privacy the public number, else the real one."""
        return self.privacy.examples if self.privacy else self.data.size
