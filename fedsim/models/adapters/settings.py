"""Settings of low-rank adapters."""

from typing import Annotated, Literal

from pydantic import Field

from fedsim.core.limits import MAX_WIDTH
from fedsim.core.settings import Settings


class LoraSettings(Settings):
    """`model.lora:` in an experiment file: low-rank adapters on frozen layers."""

    rank: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(
        default=4, description="r, the rank of each adapter"
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="an adapter is scaled by alpha / rank; null: alpha is the rank",
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
        "to its weights; adapters, the trained values alone, which need model.init to be loaded",
    )

    @property
    def scale(self) -> float:
        """Factor of an adapter: alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
