"""Settings of `local.gradient`: backward passes, or zeroth-order steps from loss differences."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from fedsim.core.settings import Settings

MAX_DIRECTIONS = 4096


class BackwardPasses:
    """Properties of training by backpropagation, which is the default of `local.gradient`.

    Attributes:
        saves_derived_model: whether clients train other values than the model's parameters, so that
            the saved model must be computed from them.
        public_parts: keys that this training adds to the public description of model and training.
        not_audited: message with which an audit refuses this training; "" if it accepts it.
        not_advised: message with which `fedsim plan --advise` refuses this training, or "".
    """

    saves_derived_model = False
    public_parts: Mapping[str, int] = {}
    not_audited = not_advised = ""


class ZerothOrderSettings(Settings):
    """The section `local.gradient` of an experiment file: steps from differences of losses."""

    # Public facts; `BackwardPasses` explains them.
    saves_derived_model: ClassVar[bool] = True
    not_audited: ClassVar[str] = (
        "local.gradient: canaries are gradients of an added layer, and zeroth-order steps have no "
        "gradients; audit the same experiment with local.gradient=backward, and its noise and "
        "clipping are probed before each run"
    )
    not_advised: ClassVar[str] = (
        "the advice compares the noise of gradients, and local.gradient: zeroth_order has slopes; "
        "call it with local.gradient=backward, and fedsim plan without --advise"
    )

    name: Literal["zeroth_order"] = Field(
        description="zeroth_order: slopes of the loss along public random directions, by forward "
        "passes only"
    )
    directions: int = Field(
        default=1,
        ge=1,
        le=MAX_DIRECTIONS,
        description="P, number of directions of a step; each gives one noisy number of an upload",
    )
    radius: float = Field(
        default=1e-3,
        gt=0,
        description="φ: a slope is (loss(w + φ v) − loss(w − φ v)) / 2 φ",
    )
    distribution: Literal["signs", "gaussian"] = Field(
        default="signs",
        description="entries of a direction v: signs, ±1, so that its length is the root of the "
        "number of trained values; gaussian, standard normals",
    )

    @property
    def public_parts(self) -> Mapping[str, int]:
        """Public description of this training: the number of random directions in a step."""
        return {"directions": self.directions}
