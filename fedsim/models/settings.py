"""Settings of the model, its adapters and its loss."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fedsim.core.limits import MAX_WIDTH
from fedsim.core.python_objects import MAY_BE_OBJECT
from fedsim.core.settings import Settings
from fedsim.models.features.settings import FeatureSettings


class LoraSettings(Settings):
    """The section `model.lora` of an experiment file: low-rank adapters on frozen layers."""

    rank: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(
        default=4, description="r, the rank of each adapter"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="an adapter's output is scaled by alpha / rank; null sets alpha to the rank",
    )
    targets: list[str] = Field(
        default=["*"],
        min_length=1,
        description="patterns of the names of linear, embedding and convolution layers that get an "
        "adapter, such as blocks.*.query",
    )
    save: Literal["merged", "adapters"] = Field(
        default="merged",
        description="content of model.safetensors: merged, the whole model with the adapters added "
        "to its weights; adapters, only the trained values, which need model.init to be loaded",
    )

    @property
    def scale(self) -> float:
        """Factor by which an adapter's output is multiplied: alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ModelSettings(Settings):
    """Settings of the section `model` of an experiment file: model, adapters and loss."""

    name: Annotated[str, MAY_BE_OBJECT] = Field(
        description="a built-in name, package.module:callable, or ./file.py:callable"
    )
    args: dict[str, Any] = Field(default={}, description="arguments of the model's callable")
    features: list[FeatureSettings] = Field(
        default=[],
        description="fixed transforms of each example before training, in order; each is a "
        "function of one example and public constants",
    )
    init: str | None = Field(
        default=None,
        description="file.safetensors with public initial weights, relative to the experiment "
        "file; null draws them from the seed",
    )
    freeze: list[str] = Field(
        default=[],
        description="patterns of names of frozen parameters, such as 0.*: no gradient, "
        "no noise, no update",
    )
    train: list[str] = Field(
        default=[],
        description="patterns of parameter names, such as head.*, that are trained; all others are "
        "frozen, and no message carries them",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="low-rank adapters on frozen layers: only they and the parameters of `train` "
        "are trained and sent; null adds none",
    )
    loss: Annotated[str, MAY_BE_OBJECT] = Field(
        default="cross_entropy",
        description="cross_entropy, mse, bce, or package.module:callable / ./file.py:callable "
        "that returns one value per example",
    )

    @property
    def has_local_base(self) -> bool:
        """Whether only trained values are sent; server and clients then build the frozen ones."""
        return bool(self.train) or self.lora is not None

    @property
    def public_parts(self) -> dict[str, Any] | None:
        """Those of `features`, `init`, `freeze`, `train` and `lora` that are set, by name.

        The value of `features` is the transforms' names, and that of `lora` is its targets. Without
        any of the settings the result is None.
        """
        parts = {
            "features": [feature.name for feature in self.features],
            "init": self.init,
            "freeze": self.freeze,
            "train": self.train,
            "lora": None if self.lora is None else self.lora.targets,
        }
        return {name: part for name, part in parts.items() if part} or None
