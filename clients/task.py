"""Everything a client needs to train: its data, the shared model, its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.accountant.ledger.journal import Journal
from fedsim.algorithms.algorithm import ClientRule
from fedsim.clients.account import AnswerInputs, request_digest
from fedsim.clients.faults import (
    NO_FAULTS,
    ClientFailureError,
    CoupledRowsError,
    FaultPlan,
    redact_error,
)
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

# Scores a model on the client's held-out examples: their number, and metrics by name.
Evaluate = Callable[[ArrayRecord], tuple[int, Mapping[str, float]]]


class Voter(Protocol):
    """Labels of the public queries of a ballot, by the teachers of the clients of a process."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        ...

    def labels(
        self,
        client: int,
        data: tuple[Tensor, Tensor],
        round_number: int,
        board: Mapping[str, np.ndarray],
    ) -> NDArray[np.int64]:
        """Return a client's label for each row of a ballot; `NO_LABEL`: no vote.

        Guarantee: no more rows have a label than the ballot of the round has queries.

        Args:
            client: its number.
            data: its features and targets (n, ...).
            round_number: the round of the ballot.
            board: the public results so far, by name.
        """
        ...


class BlockShapes(Protocol):
    """How the clients of a block share the tiles that they train in, by public facts."""

    @property
    def places(self) -> int | None:
        """Places of a tile that any client's rows may fill (see `block_of`); None: none are."""
        ...

    def rows(self, members: Sequence[int]) -> int | None:
        """Return the rows of each member in a planned block; None: as the members present need."""
        ...

    def check(self, members: Sequence[int]) -> None:
        """Check that a planned block keeps examples apart, bit for bit.

        Raises:
            UnsafeModelError: it does not.
        """
        ...


@dataclass(frozen=True)
class LocalTraining:
    """How the clients of a process train: the same for all of them.

    Attributes:
        shared_model: the model of the process, filled anew for each request.
        loss: one value per example.
        gradients: clipped sums of per-example gradients under `loss`; None without privacy.
        local: steps, batch size and optimizer.
        steps: (client, round) -> planned local steps.
        blocks: the tiles of clients that train together.
        rule: what the algorithm changes in local steps; None: nothing.
        sent: names of the arrays that the algorithm declares beside the model.
        voter: votes on public queries in place of training; None: clients train.
        noisy_examples: by client, where a client releases its examples; filled when it first
            trains.
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
    """A client's examples.

    Attributes:
        size: their number.
        tensors: returns features and targets (n, ...); called when the client trains, so that a
            waiting task holds no copy of them.
        digest: returns a digest of them. It is private, as they are.
    """

    size: int
    tensors: Callable[[], tuple[Tensor, Tensor]]
    digest: Callable[[], bytes]


@dataclass(frozen=True)
class ClientScores:
    """What a client tells of a model on its examples; nothing under privacy: noise covers none.

    Attributes:
        evaluate: scores a model on held-out examples; None: the client refuses to.
        measure: numbers of a model that a secure sum or the algorithm declares; None: none.
    """

    evaluate: Evaluate | None = None
    measure: Callable[[nn.Module], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class RunTerms:
    """What the clients of a run agree on.

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
        client: its number.
        run: the seed and the digests of the run.
        data: its examples.
        training: how it trains.
        privacy: its plan; None: training without differential privacy.
        journal: the durable ledger; None: charges are kept in the client's state alone.
        weight: its planned weight among all clients; None where all weigh the same.
        secure: seals updates; None: they are sent in clear.
        scores: what it tells of models.
        faults: faults to inject.
    """

    client: int
    run: RunTerms
    data: ClientData
    training: LocalTraining
    privacy: PrivacyPlan | None
    journal: Journal | None
    weight: int | None = None
    secure: "SecureChannel | None" = None
    scores: ClientScores = ClientScores()
    faults: FaultPlan = NO_FAULTS

    def planned_steps(self, round_number: int) -> int:
        """Return the planned local steps of a round."""
        return self.training.steps(self.client, round_number)

    def training_data(self, release: Mechanism | None) -> tuple[Tensor, Tensor]:
        """Return the features and targets (n, ...) that the client trains on.

        Guarantee: noisy ones are one release: the noise depends on seed and client alone, so any
        process and any round gets the same bits from the same examples.

        Args:
            release: the client's; None without privacy.
        """
        if release is None or not release.releases_examples:
            return self.data.tensors()
        known = self.training.noisy_examples
        if self.client not in known:
            key = stream_key(self.run.seed, Purpose.EXAMPLE_NOISE, client=self.client)
            known[self.client] = release.release_examples(*self.data.tensors(), SeededNoise(key))
        return known[self.client]

    def check_examples(self) -> None:
        """Check that the public number of examples is not 0, and that no lot is too large.

        Where the client's size is private, an empty client trains on empty lots, or not at all, and
        releases noise.

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
        """Check that the server plans the client's weight as the client does.

        Raises:
            ClientFailureError: it plans another weight; nothing was charged.
        """
        if request.weight != self.weight:
            told, own = (
                "equal weights" if weight is None else f"weight {weight:,}"
                for weight in (request.weight, self.weight)
            )
            raise ClientFailureError(
                f"refuses the request: the server plans {told} and this client {own} "
                "(federation.weighting); run the same experiment on the same data on both sides"
            )

    def check_sent(self, request: TrainRequest) -> None:
        """Check that a request holds the arrays that the algorithm declares, and no others.

        Raises:
            ClientFailureError: it does not; nothing was charged.
        """
        if set(request.sent) != set(self.training.sent):
            told, own = (
                ", ".join(sorted(one)) or "none" for one in (request.sent, self.training.sent)
            )
            raise ClientFailureError(
                f"refuses the request: the server sends the arrays {told} beside the model, and "
                f"federation.strategy of this client declares {own}"
            )

    def release(self, request: TrainRequest) -> Mechanism | None:
        """Return the release of a request, with the clipping bound in it; None without privacy.

        Guarantee: its event is that of the plan, whatever the request holds.

        Raises:
            ClientFailureError: clipping cannot have adapted to the request's bound.
        """
        if self.privacy is None:
            return None
        try:
            return self.privacy.release.resume(request.clip_norm)
        except ValueError as error:
            raise ClientFailureError(f"refuses the request: {error}") from error

    def check_block(self, block: Sequence[int]) -> None:
        """Check that a private client's examples are kept apart in the tiles of its block.

        Args:
            block: planned members of the client's block, ascending.

        Raises:
            CoupledRowsError: they are not; the message names the layer and the fix.
        """
        if self.privacy is None:
            return
        try:
            self.training.blocks.check(block)
        except UnsafeModelError as error:
            raise CoupledRowsError(str(error)) from error

    def request_digest(self, request: TrainRequest, block: tuple[int, ...], model: str) -> str:
        """Return the digest of everything that the answer to a request depends on.

        Args:
            request: the request.
            block: planned members of the client's block, ascending.
            model: digest of the request's global model.
        """
        repeats = self.privacy is not None and not self.privacy.secure_noise
        inputs = AnswerInputs(
            block=block,
            tile_rows=self.training.blocks.rows(block),
            places=self.training.blocks.places,
            model=model,
            clip_norm=request.clip_norm,
            mechanism="" if self.privacy is None else self.privacy.mechanism_text,
            conditions=self.run.conditions,
            data=self.data.digest() if repeats else None,
            sent="".join(f"{name}={digest(one)}" for name, one in sorted(request.sent.items())),
        )
        return request_digest(inputs, seed=self.run.seed, client=self.client)

    def failure(self, error: Exception) -> Exception:
        """Return what may be said of an error outside the client: of a private one, little."""
        if self.privacy is not None:
            return redact_error(error)
        known = isinstance(error, FedsimError)
        return error if known else ClientFailureError(describe_error(error))

    @property
    def examples(self) -> int:
        """The public number of examples: the planned one under privacy, else that of `data`."""
        return self.privacy.examples if self.privacy else self.data.size
