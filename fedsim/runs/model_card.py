"""What a saved model says of itself: how to build it, how to read its outputs, its origin.

It is in the header of `model.safetensors`, so that a model keeps it when the file leaves its run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fedsim.core.text_formats import parse_json

_KEY = "fedsim"  # one entry: safetensors writes several in any order


@dataclass(frozen=True)
class ModelCard:
    """The card of a saved model.

    Attributes:
        input_shape: shape of one example as the model gets it, after `model.features`.
        num_outputs: outputs per example.
        raw_input_shape: shape of one example in the dataset; None in files of older versions.
        task: `classification`, `labels` or `regression`; None in files of older versions.
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
    raw_input_shape: tuple[int, ...] | None = None
    task: str | None = None
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    experiment: str | None = None
    rounds: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    statement: str | None = None
    fedsim: str | None = None
    values: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON."""
        return {
            "input_shape": list(self.input_shape),
            "num_outputs": self.num_outputs,
            "raw_input_shape": _list(self.raw_input_shape),
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
            raw, names, columns = (
                card.get(key) for key in ("raw_input_shape", "class_names", "columns")
            )
            return cls(
                input_shape=tuple(map(int, card["input_shape"])),
                num_outputs=int(card["num_outputs"]),
                raw_input_shape=None if raw is None else tuple(map(int, raw)),
                task=card.get("task"),
                class_names=None if names is None else tuple(map(str, names)),
                columns=None if columns is None else tuple(map(str, columns)),
                experiment=card.get("experiment"),
                rounds=card.get("rounds"),
                metrics=dict(card.get("metrics") or {}),
                statement=card.get("statement"),
                fedsim=card.get("fedsim"),
                values=card.get("values"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError("it does not say what inputs the model takes") from error


def _list(values: tuple[Any, ...] | None) -> list[Any] | None:
    return None if values is None else list(values)
