"""The base class of all settings, and settings that choose among several classes."""

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
    ValidationError,
    WrapValidator,
)
from pydantic_core import CoreSchema, core_schema

from fedsim.core.limits import MAX_NUMBER, MIN_PROBABILITY
from fedsim.core.python_objects import PythonObject

MAY_BE_OBJECT = WrapValidator(
    lambda given, validate: given if isinstance(given, PythonObject) else validate(given)
)
"""Annotation of a setting that takes a Python object in place of a plug-in's name."""


def _limit_numbers(schema: Any, model: type[BaseModel], limit: float) -> None:
    """Add a limit to each number of a model's schema; nested models limit their own numbers."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _limit_numbers(part, model, limit)
    if not isinstance(schema, dict) or schema.get("cls", model) is not model:
        return
    if schema.get("type") == "float":
        if not {"le", "lt"} & schema.keys():
            schema["le"] = limit
        if not {"ge", "gt"} & schema.keys():
            schema["ge"] = -limit
    for part in schema.values():
        _limit_numbers(part, model, limit)


class Settings(BaseModel):
    """Base class of settings: immutable, no unknown keys, no silent conversions, finite numbers.

    Attributes:
        limit: largest absolute value of a number whose field has no limit of its own. It is None
            in classes whose numbers are only compared with data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    limit: ClassVar[float | None] = MAX_NUMBER

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the pydantic schema of the class, with limits of its numbers."""
        schema = handler(source)
        if cls.limit is not None:
            _limit_numbers(schema, cls, cls.limit)
        return schema


def first_mistake(error: ValidationError, *above: str) -> str:
    """Return the first mistake of a validation as `key.path: rule`.

    Args:
        error: the error of pydantic.
        above: keys above the validated settings.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, (*above, *first['loc'])))}: {first['msg']}"


@dataclass(frozen=True)
class Branch:
    """Rule that chooses a settings class by the value of one key; the value may be any text.

    Attributes:
        key: the key whose value decides, such as scheme.
        branch_of: function that returns, for a value of the key, the tag (pydantic `Tag`) of the
            settings class.
    """

    key: str
    branch_of: Callable[[str], str]

    @property
    def __name__(self) -> str:
        """The key, which pydantic shows in its errors as the discriminator's name."""
        return self.key

    def __call__(self, value: object) -> str | None:
        """Return the tag of the settings class for a mapping or a settings object."""
        given = value.get(self.key) if isinstance(value, dict) else getattr(value, self.key, None)
        return self.branch_of(given) if isinstance(given, str) else None


class Choice:
    """Annotation of a field whose settings class is chosen by the value of the key `name`.

    In a file, `clipping: adaptive` means `clipping: {name: adaptive}`: the class of that name with
    its default settings. A mapping whose only key is `name` is written as the name alone.
    """

    tag = "name"

    def choices(self, classes: Any) -> dict[str, type[BaseModel]]:
        """Return a mapping from each possible name to its settings class.

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
        """Return the schema of the mappings, which also accepts a name alone."""
        mappings = core_schema.tagged_union_schema(
            {name: handler.generate_schema(model) for name, model in self.choices(source).items()},
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
        """Return the JSON Schema of a choice: a name or a mapping."""
        names = {"enum": list(schema["schema"]["choices"]), "type": "string"}
        return {"anyOf": [names, handler(schema["schema"])]}

    def _shortest(self, value: object, handler: SerializerFunctionWrapHandler) -> object:
        written = handler(value)
        return written[self.tag] if written.keys() == {self.tag} else written


def written_name(choice: object) -> str:
    """Return the `name` that a value in a file chooses; "" if it has no name.

    Args:
        choice: the value in the file: a name alone, or a mapping with `name`.
    """
    name = choice.get(Choice.tag) if isinstance(choice, Mapping) else choice
    return name if isinstance(name, str) else ""


def _refuse_tiny(value: float) -> float:
    if value < MIN_PROBABILITY:
        raise ValueError(f"must be >= {MIN_PROBABILITY:g}, got {value:g}")
    return value


Probability = Annotated[float, Field(gt=0, lt=1), AfterValidator(_refuse_tiny)]
"""A number in (0, 1) that is at least `MIN_PROBABILITY`."""

Share = Annotated[float, Field(gt=0, le=1), AfterValidator(_refuse_tiny)]
"""A number in (0, 1] that is at least `MIN_PROBABILITY`."""
