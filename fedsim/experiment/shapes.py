"""The keys that the settings classes allow in each section of the file (the section's shape).

An error of pydantic does not list them, and its location contains names of union branches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from fedsim.core.settings import Branch, Choice
from fedsim.experiment.errors import KeyPath, any_of

Model = type[BaseModel]


@dataclass(frozen=True)
class TaggedUnion:
    """A choice of settings classes for a mapping; the value of one key, the tag, selects one."""

    tag: str
    variants: dict[str, Model]  # by the tag's value, or by a name for several of its values
    branch_of: Callable[[str], str] = str  # from a value of the tag to a key of `variants`
    takes_name: bool = False  # the bare value of the tag is allowed, as in `clipping: adaptive`
    default: str | None = None  # value of the tag if the file has no mapping here

    @property
    def choices(self) -> list[str]:
        """Values of the tag to list in error messages; only examples where a class gives them."""
        return self.choices_with(self.tag)

    def choices_with(self, key: str) -> list[str]:
        """Return such values of the tag, of the classes that have a key."""
        models = [model for model in self.variants.values() if key in model.model_fields]
        fields = [model.model_fields[self.tag] for model in models]
        listed = (field.examples or get_args(field.annotation) for field in fields)
        return list(dict.fromkeys(map(str, chain.from_iterable(listed))))

    @property
    def known(self) -> list[str]:
        """All known values of the tag that select a class."""
        fields = [model.model_fields[self.tag] for model in self.variants.values()]
        return [value for field in fields for value in get_args(field.annotation)]

    def variant(self, value: object) -> Model | None:
        """Return the settings class that a value of the tag selects, or None if it selects none."""
        return self.variants.get(self.branch_of(value)) if isinstance(value, str) else None

    def mapping(self, given: object) -> dict[str, object]:
        """Return a value as a mapping: a bare name as `{tag: name}`, any other as an empty one."""
        if self.takes_name and isinstance(given, str):
            return {self.tag: given}
        return given if isinstance(given, dict) else {}


@dataclass(frozen=True)
class NameOrMapping:
    """A kind of setting: a name, or a mapping with the keys of one settings class."""

    mapping: Model


@dataclass(frozen=True)
class ModelCollection:
    """A kind of setting: a list or free-form mapping, whose items have one shape."""

    item: "Shape"


@dataclass(frozen=True)
class NumberOrWord:
    """A kind of setting: a number, or one of a few words."""

    words: tuple[str, ...]


# None: a value without keys, or a free-form mapping.
Shape = Model | TaggedUnion | NameOrMapping | ModelCollection | NumberOrWord | None


def shape_of(field: FieldInfo) -> Shape:
    """Return the shape of a settings field's value: which keys the value may have."""
    takes_name = any(isinstance(mark, Choice) for mark in field.metadata)
    is_union = get_origin(field.annotation) in (Union, UnionType)
    options = get_args(field.annotation) if is_union else (field.annotation,)
    options = [option for option in options if option is not NoneType]
    models = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
    tag = Choice.tag if takes_name else field.discriminator
    if isinstance(tag, str):
        names = {model: get_args(model.model_fields[tag].annotation) for model in models}
        variants = {name: model for model in models for name in names[model]}
        default = getattr(field.default, tag, None)
        return TaggedUnion(tag, variants, takes_name=takes_name, default=default)
    marks = [getattr(mark, "discriminator", None) for mark in (tag, *field.metadata)]
    branch = next((mark for mark in marks if isinstance(mark, Branch)), None)
    if branch is not None:
        tagged = [(mark, get_args(each)[0]) for each in options for mark in get_args(each)[1:]]
        variants = {mark.tag: model for mark, model in tagged if isinstance(mark, Tag)}
        return TaggedUnion(branch.key, variants, branch.branch_of)
    if len(models) == 1:
        return models[0] if len(options) == 1 else NameOrMapping(models[0])
    literals = [option for option in options if get_origin(option) is Literal]
    if literals and len(options) > 1:
        return NumberOrWord(tuple(word for literal in literals for word in get_args(literal)))
    if len(options) == 1 and get_origin(options[0]) in (dict, list):
        *_, item = get_args(options[0])
        return ModelCollection(shape_of(FieldInfo.from_annotation(item)))
    return None


def chosen_shape(shape: Shape, value: object) -> Shape:
    """Return the shape of a mapping in the variant of a union that its value selects."""
    if isinstance(shape, TaggedUnion):
        return shape.variant(shape.mapping(value).get(shape.tag))
    return shape.mapping if isinstance(shape, NameOrMapping) else shape


def child_shape(shape: Shape, key: str) -> Shape:
    """Return the shape (allowed keys) of a key's value; None if the value has no known keys."""
    if isinstance(shape, ModelCollection):
        return shape.item
    if isinstance(shape, type) and key in shape.model_fields:
        return shape_of(shape.model_fields[key])
    return None


def keys_of(shape: Shape) -> dict[str, FieldInfo]:
    """Return the keys, of all values of a tag, that a shape allows, with their pydantic fields."""
    if isinstance(shape, TaggedUnion):
        variants = shape.variants.values()
        return {key: field for each in variants for key, field in each.model_fields.items()}
    model = shape.mapping if isinstance(shape, NameOrMapping) else shape
    return dict(model.model_fields) if isinstance(model, type) else {}


def sections_with_key(shape: Shape, key: str, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all sections, of a shape at a path, that have a key of this name."""
    if key in keys_of(shape):
        yield path
    for name, field in keys_of(shape).items():
        yield from sections_with_key(shape_of(field), key, (*path, name))


def field_purpose(field: FieldInfo) -> str:
    """Return the description of a key, or the choices of a section that has no description."""
    shape = shape_of(field)
    if field.description or not isinstance(shape, TaggedUnion):
        return field.description or "a section"
    return f"a mapping with {shape.tag}: {any_of(shape.choices)}"
