"""Lots of the caller's own loader: what each costs, and which are refused.

The engine sees the size of such a lot, and nothing of how it was drawn. Amplification by sampling
holds for lots that nobody can predict, so it is claimed where the caller declares Poisson samples,
and nowhere else.
"""

import logging
from collections.abc import Mapping

from fedsim.accountant import Event
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.privacy_engine.lot_sizes import LotSizes, NotPoissonError
from fedsim.clients.privacy_engine.terms import PrivacyTerms
from fedsim.core.errors import FedsimError

logger = logging.getLogger(__name__)

_WAYS = (
    "take lots from engine.batches(x, y), engine.private_loader(loader) or "
    "PrivacyEngine.make_private(...), or pass lots='poisson' if your loader draws each example "
    "independently with probability batch_size / sample_size"
)


class OutsideLotError(FedsimError, RuntimeError):
    """A lot of the caller's own loader that the account cannot cover."""


class OutsideLots:
    """Sizes and charges of the lots that the engine did not draw.

    Guarantee: a lot that is not declared a Poisson sample is charged as a release on a known lot.

    Args:
        terms: of the engine.
    """

    def __init__(self, terms: PrivacyTerms) -> None:
        self._terms = terms
        self._sizes = LotSizes(terms.sample_size, terms.batch_size / terms.sample_size)
        self._failure: NotPoissonError | None = None
        self.are_amplified = True  # whether all lots so far were declared Poisson samples

    def check_claim(self) -> None:
        """Check that no lot has contradicted the declared sampling.

        Raises:
            NotPoissonError: the lots cannot have been Poisson samples.
        """
        if self._failure is not None:
            raise self._failure

    def check_size(self, examples: int) -> None:
        """Refuse a lot with more examples than there can be.

        Args:
            examples: in the lot.

        Raises:
            OutsideLotError: some example occurs twice, or rows are no examples.
        """
        name = "sample_size" if self._terms.lots == "poisson" else "batch_size"
        most: int = getattr(self._terms, name)
        if examples > most:
            raise OutsideLotError(
                f"a lot of {examples} examples came through loss.backward(), of {name}={most}: "
                "rows are no examples, or an example occurs twice, and its charge pays for one "
                "clipped gradient. For K views of each example make the engine with "
                f"augmentations=K; else declare the {name} that the loader has"
            )

    def event(self, examples: int, mechanism: DpSgdMechanism) -> Event:
        """Return the event of a lot, and note its size.

        Args:
            examples: in the lot.
            mechanism: of the step.

        Raises:
            OutsideLotError: the lot has too many examples, or no guarantee.
            NotPoissonError: lots that are declared Poisson samples cannot be such.
        """
        self.check_size(examples)
        if self._terms.lots == "poisson":
            try:
                self._sizes.add_size(examples)
            except NotPoissonError as error:
                self._failure = error
                raise
            return mechanism.event
        self._refuse_unaccounted()
        if self.are_amplified:
            logger.warning(
                "a lot that the engine did not draw is charged without amplification by sampling, "
                "and so is every further one; for a smaller epsilon %s",
                _WAYS,
            )
        self.are_amplified = False
        return mechanism.mechanism

    def state(self) -> Mapping[str, object]:
        """Return the counters to resume from."""
        return {"sizes": self._sizes.counts, "are_amplified": self.are_amplified}

    def restore(self, state: Mapping[str, object]) -> None:
        """Resume from `state`."""
        sizes = state["sizes"]
        if not isinstance(sizes, Mapping):
            raise TypeError(f"sizes of lots must be a map, got {sizes!r}")
        self._sizes.restore(dict(sizes))
        self.are_amplified = bool(state["are_amplified"])

    def _refuse_unaccounted(self) -> None:
        terms = self._terms
        if terms.target_epsilon is not None:
            raise OutsideLotError(
                f"the noise was calibrated to target_epsilon={terms.target_epsilon:g} for Poisson "
                f"lots, and this lot came from outside; {_WAYS}"
            )
        if terms.adjacency == "add_remove":
            raise OutsideLotError(
                "adjacency='add_remove' has no guarantee for lots from outside: one more example "
                f"may move others to another lot; {_WAYS}"
            )
