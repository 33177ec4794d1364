"""What a saved model says of itself: how to build it, how to read its outputs, its origin.

It is in the header of `model.safetensors`, so that a model keeps it when the file leaves its run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fedsim.core.text_formats import parse_json

_KEY = "fedsim"  # one entry: safetensors writes several in any order


@dataclass(frozen=True)
class ModelCard:
    """The card of a saved model.

    Attributes:
        input_shape: shape of one example as the model gets it, after `model.features`.
        num_outputs: outputs per example.
        raw_input_shape: shape of one example in the dataset.
        task: `classification`, `labels` or `regression`.
        class_names: name of each class; None where the data do not name them.
        columns: the columns of a table that are features, in the order of the inputs; None where
            the data are no table.
        experiment: name of the experiment.
        rounds: number of rounds that the model is from.
        metrics: its metrics on the public test set, by name.
        statement: the guarantee in words, as in `privacy.json`.
        fedsim: version that trained it.
        values: digest of the values that travelled, where the file holds the model made from them
            and from the parts that do not travel; None where the file holds those values.
    """

    input_shape: tuple[int, ...]
    num_outputs: int
    raw_input_shape: tuple[int, ...]
    task: str
    class_names: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    experiment: str
    rounds: int
    metrics: Mapping[str, Any]
    statement: str
    fedsim: str
    values: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON."""
        return {
            "input_shape": list(self.input_shape),
            "num_outputs": self.num_outputs,
            "raw_input_shape": list(self.raw_input_shape),
            "task": self.task,
            "class_names": _list(self.class_names),
            "columns": _list(self.columns),
            "experiment": self.experiment,
            "rounds": self.rounds,
            "metrics": dict(self.metrics),
            "statement": self.statement,
            "fedsim": self.fedsim,
            **({} if self.values is None else {"values": self.values}),
        }

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return {_KEY: json.dumps(self.to_json())}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Return the card in the metadata of a file.

        Raises:
            ValueError: the metadata have none.
        """
        try:
            card = parse_json(metadata[_KEY])
            names, columns = card["class_names"], card["columns"]
            return cls(
                input_shape=tuple(map(int, card["input_shape"])),
                num_outputs=int(card["num_outputs"]),
                raw_input_shape=tuple(map(int, card["raw_input_shape"])),
                task=card["task"],
                class_names=None if names is None else tuple(map(str, names)),
                columns=None if columns is None else tuple(map(str, columns)),
                experiment=card["experiment"],
                rounds=card["rounds"],
                metrics=dict(card["metrics"]),
                statement=card["statement"],
                fedsim=card["fedsim"],
                values=card.get("values"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError("it does not say what inputs the model takes") from error


def _list(values: tuple[Any, ...] | None) -> list[Any] | None:
    return None if values is None else list(values)
