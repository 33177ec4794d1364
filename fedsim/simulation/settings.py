"""How the federation is executed; nothing here changes a result or an ε."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.server.settings import Settings


class RuntimeSettings(Settings):
    """`runtime:` in an experiment file."""

    engine: Literal["local", "flower"] = Field(
        default="local",
        description="local: in this process; flower: Flower's simulation runtime (extra `ray`)",
    )
    workers: int = Field(default=1, ge=1, description="worker processes (engine flower)")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where clients train; auto: CUDA where there is one"
    )
    trackers: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(
        default=[],
        description="who is told of every round beside rounds.jsonl; each is an extra of its name",
    )

    cohort: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="clients of one process that train together in stacked tensors; auto: as many "
        "as are faster than one by one",
    )

    @model_validator(mode="after")
    def _workers_need_an_engine(self) -> Self:
        if self.engine == "local" and self.workers > 1:
            raise ValueError(
                f"engine local runs in one process, got workers: {self.workers}; "
                "use engine: flower for more"
            )
        return self
