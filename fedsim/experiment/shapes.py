"""What the settings allow at a place of the file: which keys, of which variant.

Pydantic reports an error with the names of union branches inside its location
(`data.partition.dirichlet.alpha`), and it does not say which keys there are. Walking the settings
classes along that location gives the path as written and the class whose keys count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsim.experiment.text import KeyPath, any_of

Model = type[BaseModel]


@dataclass(frozen=True)
class Tagged:
    """A union of settings told apart by the value of one key, the tag."""

    tag: str
    variants: dict[str, Model]


@dataclass(frozen=True)
class Either:
    """A plain value (a name) or a mapping with the keys of one class."""

    mapping: Model


@dataclass(frozen=True)
class Named:
    """A mapping from names of the user's choice, or a list, of the keys of one class."""

    each: Model


@dataclass(frozen=True)
class Words:
    """A number, or one of a few words in its place."""

    words: tuple[str, ...]


Shape = Model | Tagged | Either | Named | Words | None  # None: a leaf, or free-form


@dataclass(frozen=True)
class Place:
    """Where an error is: the path as the file has it, and the shape of what holds the key."""

    path: KeyPath
    holder: Shape
    union: KeyPath | None = None  # the `Either` above it, if there is one,
    as_mapping: bool = False  # and whether pydantic tried it as a mapping


def shape_of(field: FieldInfo) -> Shape:
    """Return the shape of a field's value."""
    options = [option for option in _options(field.annotation) if option is not NoneType]
    models = [option for option in options if _is_model(option)]
    if isinstance(field.discriminator, str):
        return Tagged(field.discriminator, _variants(field.discriminator, models))
    if len(models) == 1:
        return models[0] if len(options) == 1 else Either(models[0])
    words = [word for option in options for word in _words(option)]
    if words and len(options) > 1:
        return Words(tuple(words))
    if len(options) == 1 and get_origin(options[0]) in (dict, list):
        *_, value = get_args(options[0])
        return Named(value) if _is_model(value) else None
    return None


def place(root: Model, location: tuple[int | str, ...]) -> Place:
    """Return where a pydantic error is, with union branches dropped from the path."""
    path: list[str | int] = []
    holder: Shape = root  # the shape that the last key of the path belongs to
    shape: Shape = root
    union: KeyPath | None = None
    as_mapping = False
    for part in location:
        if isinstance(shape, Tagged):
            shape = shape.variants.get(str(part))
        elif isinstance(shape, Words):
            shape = None
        elif isinstance(shape, Either):
            union, as_mapping = tuple(path), part == shape.mapping.__name__
            shape = shape.mapping if as_mapping else None
        else:
            path.append(part)
            holder, shape = shape, child(shape, str(part))
    return Place(tuple(path), holder, union, as_mapping)


def child(shape: Shape, key: str) -> Shape:
    """Return the shape under a key of a class (None for a key it does not have)."""
    if isinstance(shape, Named):
        return shape.each
    if isinstance(shape, type) and key in shape.model_fields:
        return shape_of(shape.model_fields[key])
    return None


def keys_of(shape: Shape) -> dict[str, FieldInfo]:
    """Return the keys that may occur in a mapping of this shape, in any of its variants."""
    if isinstance(shape, Tagged):
        fields: dict[str, FieldInfo] = {}
        for variant in shape.variants.values():
            fields |= variant.model_fields
        return fields
    if isinstance(shape, Named | Words):
        return {}
    model = shape.mapping if isinstance(shape, Either) else shape
    return dict(model.model_fields) if model is not None else {}


def homes_of(root: Model, key: str) -> list[KeyPath]:
    """Return the sections, anywhere in the file, that have a key of this name."""
    return [path for path, shape in _sections(root, ()) if key in keys_of(shape)]


def wanted(field: FieldInfo) -> str:
    """Return what a missing key is for: its description, or else what it must be."""
    if field.description:
        return field.description
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return any_of(get_args(annotation))
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    text = words.get(annotation, "a section") if isinstance(annotation, type) else "a section"
    for rule in field.metadata:
        if isinstance(rule, Ge):
            text += f" >= {rule.ge}"
        elif isinstance(rule, Gt):
            text += f" > {rule.gt}"
    shape = shape_of(field)
    if isinstance(shape, Tagged):
        return f"a mapping with {shape.tag}: {any_of(list(shape.variants))}"
    return text


def _sections(shape: Shape, path: KeyPath) -> Iterator[tuple[KeyPath, Shape]]:
    if shape is None:
        return
    yield path, shape
    for key, field in keys_of(shape).items():
        yield from _sections(shape_of(field), (*path, key))


def _options(annotation: object) -> tuple[object, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)


def _words(option: object) -> tuple[str, ...]:
    return get_args(option) if get_origin(option) is Literal else ()


def _is_model(option: object) -> TypeGuard[Model]:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _variants(tag: str, models: list[Model]) -> dict[str, Model]:
    return {
        name: model for model in models for name in get_args(model.model_fields[tag].annotation)
    }
