"""`local.augment` of an experiment: the random views of an example. No torch, no numpy."""

from typing import Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from fedsim.core.settings import Settings

MAX_VIEWS = 256
MAX_SHIFT = 1024


class ViewSettings(Settings):
    """One random change of an example: `{shift: 1}`, `flip` or `{noise: 0.1}`."""

    shift: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SHIFT,
        description="most pixels by which an image moves up or down, and left or right; zeros move "
        "in",
    )
    flip: Literal[True] | None = Field(
        default=None, description="an image is mirrored left to right, with probability 1/2"
    )
    noise: float | None = Field(
        default=None, gt=0, description="standard deviation of Gaussian noise on every value"
    )

    @property
    def name(self) -> str:
        """The name of the change."""
        return next(name for name, value in self if value is not None)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value == "flip":
            return {"flip": True}
        raise ValueError(f"must be flip, {{shift: 1}} or {{noise: 0.1}}, got {value[:60]!r}")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        found = [name for name, value in self if value is not None]
        if len(found) != 1:
            names = " and ".join(found) or "none"
            raise ValueError(
                f"an item of the list is one of shift, flip and noise, got {names}; write each as "
                "its own item"
            )
        return self

    @model_serializer
    def _short(self) -> Any:
        return "flip" if self.flip else {self.name: getattr(self, self.name)}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mapping = {**handler.resolve_ref_schema(handler(schema))}
        mapping |= {"minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": ["flip"]}, mapping]}


DEFAULT_VIEWS = (ViewSettings(shift=1),)
