"""The base class of all settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from fedsim.core.limits import MAX_NUMBER, MIN_PROBABILITY


def _limit_numbers(schema: Any, model: type[BaseModel], limit: float) -> None:
    """Give each number of a model a limit; models inside it give their own."""
    if isinstance(schema, list | tuple):
        for one in schema:
            _limit_numbers(one, model, limit)
    if not isinstance(schema, dict) or schema.get("cls", model) is not model:
        return
    if schema.get("type") == "float":
        if not {"le", "lt"} & schema.keys():
            schema["le"] = limit
        if not {"ge", "gt"} & schema.keys():
            schema["ge"] = -limit
    for one in schema.values():
        _limit_numbers(one, model, limit)


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, no silent conversions, finite numbers.

    A number whose field sets no limit must be between -`limit` and `limit`. A class of numbers that
    are only compared with data sets `limit` to None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    limit: ClassVar[float | None] = MAX_NUMBER

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of pydantic, with the limits of numbers."""
        schema = handler(source)
        if cls.limit is not None:
            _limit_numbers(schema, cls, cls.limit)
        return schema


@dataclass(frozen=True)
class Branch:
    """Choice among settings classes by one key, for keys whose values are not all known.

    Attributes:
        key: the key, such as scheme.
        branch_of: returns the tag of the class for a value of the key.
    """

    key: str
    branch_of: Callable[[str], str]

    @property
    def __name__(self) -> str:
        """The key: pydantic names a discriminator in its errors."""
        return self.key

    def __call__(self, value: object) -> str | None:
        """Return the tag of the class that a mapping, or settings, belong to."""
        given = value.get(self.key) if isinstance(value, dict) else getattr(value, self.key, None)
        return self.branch_of(given) if isinstance(given, str) else None


class Choice:
    """Annotation of a choice among settings classes by their `name`, where a name alone is enough.

    `clipping: adaptive` is `clipping: {name: adaptive}` with the defaults of that class. A mapping
    of no other key than the name is written as the name.
    """

    tag = "name"

    def choices(self, classes: Any) -> dict[str, type[BaseModel]]:
        """Return the class of each name.

        Args:
            classes: a settings class, or a union of such classes.
        """
        models: tuple[type[BaseModel], ...] = get_args(classes) or (classes,)
        return {
            name: model
            for model in models
            for name in get_args(model.model_fields[self.tag].annotation)
        }

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the mappings, which takes a name for a mapping with that name."""
        mappings = core_schema.tagged_union_schema(
            {name: handler.generate_schema(one) for name, one in self.choices(source).items()},
            discriminator=self.tag,
        )
        return core_schema.no_info_before_validator_function(
            lambda given: {self.tag: given} if isinstance(given, str) else given,
            mappings,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                self._shortest, schema=mappings
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON Schema of a name or a mapping."""
        names = {"enum": list(schema["schema"]["choices"]), "type": "string"}
        return {"anyOf": [names, handler(schema["schema"])]}

    def _shortest(self, value: object, handler: SerializerFunctionWrapHandler) -> object:
        written = handler(value)
        return written[self.tag] if written.keys() == {self.tag} else written


def written_name(choice: object) -> str:
    """Return the name of a choice as a file has it: a name, or a mapping with one; "" for another.

    Args:
        choice: the value of its key.
    """
    name = choice.get(Choice.tag) if isinstance(choice, Mapping) else choice
    return name if isinstance(name, str) else ""


def _refuse_tiny(value: float) -> float:
    if value < MIN_PROBABILITY:
        raise ValueError(f"must be >= {MIN_PROBABILITY:g}, got {value:g}")
    return value


Probability = Annotated[float, Field(gt=0, lt=1), AfterValidator(_refuse_tiny)]
"""A number between 0 and 1, both excluded, that float64 holds with all its digits."""

Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_refuse_tiny)]
"""A number above 0 and at most 1, likewise."""
