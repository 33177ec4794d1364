"""Settings of zeroth-order steps."""

from typing import Literal

from pydantic import Field

from fedsim.core.settings import Settings

MAX_DIRECTIONS = 4096


class ZerothOrderSettings(Settings):
    """`local.gradient` in an experiment file: steps from differences of losses."""

    name: Literal["zeroth_order"] = Field(
        description="zeroth_order: slopes of the loss along public random directions, by forward "
        "passes alone"
    )
    directions: int = Field(
        default=1,
        ge=1,
        le=MAX_DIRECTIONS,
        description="P, directions of a step; each is one noisy number of an upload",
    )
    radius: float = Field(
        default=1e-3,
        gt=0,
        description="φ: a slope is (loss(w + φ v) − loss(w − φ v)) / 2 φ",
    )
    law: Literal["signs", "gaussian"] = Field(
        default="signs",
        description="entries of a direction v: signs, ±1, so that its length is the root of the "
        "number of trained values; gaussian, standard normals",
    )
