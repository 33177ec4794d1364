"""What the engine knows about the caller's loss: whether it keeps examples apart."""

import logging
from collections.abc import Mapping

from fedsim.core.errors import FedsimError

logger = logging.getLogger(__name__)

_WAYS = (
    "either call engine.check_isolation(loss, x, y) once, now or later, with the same loss and a "
    "few public examples of all kinds of labels; or call engine.backward(losses) in place of "
    "loss.backward(), with one loss for each example (reduction='none')"
)


class UncheckedLossError(FedsimError, RuntimeError):
    """An ε was asked for that would hold for losses of one kind only, which nobody has checked."""


class LossEvidence:
    """Whether all losses so far were given by example, or checked.

    A loss of one value may divide by what depends on all examples (class weights or ignored labels
    under a mean), or by another number than declared. Then one example moves the gradients of all
    others, and backward passes do not show it.
    """

    def __init__(self) -> None:
        self.has_plain_backward = self.is_checked = False

    def note_plain_backward(self) -> None:
        """Note gradients of a `loss.backward()` of the caller's own."""
        if not self.has_plain_backward and not self.is_checked:
            logger.warning(
                "loss.backward() does not show whether the loss keeps examples apart, so "
                "get_epsilon() will refuse; %s",
                _WAYS,
            )
        self.has_plain_backward = True

    def require(self) -> None:
        """Check that every loss is known to keep examples apart.

        Raises:
            UncheckedLossError: a `loss.backward()` is not covered by a check.
        """
        if self.has_plain_backward and not self.is_checked:
            raise UncheckedLossError(
                "no epsilon is known: loss.backward() ran, and whether the loss keeps examples "
                f"apart was not checked; {_WAYS}"
            )

    def state(self) -> dict[str, bool]:
        """Return what to resume from."""
        return {"has_plain_backward": self.has_plain_backward, "is_checked": self.is_checked}

    def restore(self, state: Mapping[str, bool]) -> None:
        """Resume from `state`; a check of this engine stays."""
        self.has_plain_backward = bool(state["has_plain_backward"])
        self.is_checked = self.is_checked or bool(state["is_checked"])
