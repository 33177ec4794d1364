"""Names and descriptions of the engines and the built-in trackers; imports nothing heavy."""

ENGINES = {
    "local": "in this process",
    "ray": "clients pinned to worker processes, on one machine or many (extra ray)",
    "flower": "Flower's simulation runtime (extra ray)",
}

# A key is the name of the package that must be installed, and of the extra that brings it.
TRACKERS = {
    "tensorboard": "event files in tensorboard/ of the run directory (extra tensorboard)",
    "mlflow": "files in mlflow/ of the run directory, or an MLflow server (extra mlflow)",
    "wandb": "Weights & Biases, offline, in wandb/ of the run directory (extra wandb)",
}
