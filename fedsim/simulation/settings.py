"""Settings of the execution (`runtime:`); no engine and no tracker changes a result or an ε."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_WORKERS
from fedsim.core.settings import Settings

ENGINES = {
    "local": "in this process",
    "ray": "clients pinned to worker processes, on one machine or many (extra ray)",
    "flower": "Flower's simulation runtime (extra ray)",
}

# A key is the name of the package that must be installed, and of the extra that installs it.
TRACKERS = {
    "tensorboard": "event files in tensorboard/ of the run directory (extra tensorboard)",
    "mlflow": "files in mlflow/ of the run directory, or an MLflow server (extra mlflow)",
    "wandb": "Weights & Biases, offline, in wandb/ of the run directory (extra wandb)",
}


class RuntimeSettings(Settings):
    """Settings `runtime:` of an experiment file, which say where and how a run is executed."""

    engine: Literal["local", "ray", "flower"] = Field(
        default="local",
        description="local: in this process; ray: clients pinned to worker processes, on one "
        "machine or many; flower: Flower's simulation runtime (both: extra `ray`)",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="worker processes of engine ray or flower, a thread each",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="engine ray: address of a running Ray cluster, host:port or auto; null: start "
        "Ray on this machine for the run",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="device on which clients train; auto: CUDA if the machine has it",
    )
    trackers: list[str] = Field(
        default=[],
        description="trackers that log every round, beside rounds.jsonl: "
        f"{', '.join(TRACKERS)} (each is an extra of its name), package.module:Class or "
        "./file.py:Class",
    )

    @model_validator(mode="after")
    def _workers_need_an_engine(self) -> Self:
        if self.engine == "local" and self.workers > 1:
            raise ValueError(
                f"engine local runs in one process, got workers: {self.workers}; "
                "use engine: ray for more"
            )
        return self

    @model_validator(mode="after")
    def _address_is_a_cluster_of_this_machine(self) -> Self:
        if self.address is None:
            return self
        if self.engine != "ray":
            raise ValueError(f"address is for engine: ray, got engine: {self.engine}")
        if self.address.startswith("ray://"):
            raise ValueError(
                f"address {self.address} is a Ray client's, and the ledger needs the run on a "
                "machine of the cluster; start fedsim there and write host:port or auto"
            )
        return self
