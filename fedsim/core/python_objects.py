"""Python objects in an experiment: a dataset, a model or a loss that is defined in a notebook.

In settings, an object is a `PythonObject`: the text `python:NAME`, which also holds the object.
Files and messages get the text alone, so no array and no code leaves the process. Another process
refuses the text, with a message that says how to use a file instead.

A run records the code of an object and of the functions and classes that this code uses:

| what the object's code uses                     | what is recorded of it                      |
|-------------------------------------------------|---------------------------------------------|
| functions and classes of the same module        | a digest of their byte code                 |
| anything of another module                      | the module, as if a plug-in file imported it|
| numbers, texts, and lists of them in variables  | a digest with the user's key: they may be   |
|                                                 | computed from private examples              |
| other values in variables, such as arrays       | their type; examples and initial weights    |
|                                                 | have digests of their own                   |
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import CodeType, FunctionType, ModuleType
from typing import Any, Self

_PREFIX = "python:"
_ARRAYS = "arrays"
_ARRAY_COUNTS = (2, 4)
_KEYS = ("data.dataset", "model.name", "model.loss")
PLACES = "data.dataset, model.name and model.loss"
"""The settings that take Python objects, in words."""


class PythonObject(str):
    """Reference `python:NAME` together with the object that it names.

    Copies of settings share the object. A pickled or written reference is the text alone.

    Args:
        name: name of the object.
        value: a function or a class, or arrays (x, y) or (x_train, y_train, x_test, y_test).
    """

    __slots__ = ("value",)
    value: object

    def __new__(cls, name: str, value: object) -> Self:
        """Return the reference of an object."""
        reference = super().__new__(cls, _PREFIX + name)
        reference.value = value
        return reference

    def __deepcopy__(self, memo: object) -> Self:
        """Return the reference itself: settings are immutable."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Return the text alone, so that no private data leave the process."""
        return str, (str.__str__(self),)

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.removeprefix(_PREFIX)

    @property
    def arrays(self) -> tuple[object, ...] | None:
        """The arrays of a dataset; None for a function or a class."""
        return self.value if isinstance(self.value, tuple) else None

    def code(self) -> "ObjectCode":
        """Return the byte code of the object, and the values and modules that this code uses."""
        walk = _Walk(getattr(self.value, "__module__", None))
        if self.arrays is None:
            walk.follow([(self.name, self.value)])
        return ObjectCode(tuple(walk.code), tuple(walk.values), frozenset(walk.modules))


def is_object_name(reference: str) -> bool:
    """Whether a reference starts with `python:`, so that it names a Python object."""
    return reference.startswith(_PREFIX)


def file_instead(reference: str) -> str:
    """Return the end of an error message, which says how to use a file in place of an object."""
    name = reference.removeprefix(_PREFIX)
    if name == _ARRAYS:
        return (
            "save the arrays by numpy.savez('data.npz', x=x, y=y) and write "
            "dataset: {path: data.npz, target: y}"
        )
    return f"write it into a file and name it ./file.py:{name}"


def takes_object(path: Iterable[str | int]) -> bool:
    """Whether a setting takes Python objects.

    Args:
        path: keys from the top level to the setting, in an experiment or in a comparison's variant.
    """
    keys = ".".join(key for key in path if isinstance(key, str))
    return any(keys == key or keys.endswith(f".{key}") for key in _KEYS)


def object_of(value: object) -> PythonObject | None:
    """Return a `PythonObject` for a function, a class or a dataset's arrays; else None."""
    if isinstance(value, FunctionType | type):
        name = value.__name__.strip("<>")  # of a lambda
        return PythonObject(name, value)
    if not isinstance(value, tuple | list) or len(value) not in _ARRAY_COUNTS:
        return None
    return PythonObject(_ARRAYS, tuple(value)) if any(map(is_array, value)) else None


def callable_of(reference: str) -> Callable[..., Any] | None:
    """Return the function or class that a `PythonObject` holds; None for other references."""
    value = reference.value if isinstance(reference, PythonObject) else None
    return value if callable(value) else None


def is_array(value: object) -> bool:
    """Whether a value is an array, a tensor or a table, with at least one dimension."""
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def refusal(value: object, path: Sequence[str | int]) -> str | None:
    """Return an error message for a value that cannot be a Python object of an experiment.

    Args:
        value: a value for which `object_of` returns None. For a text, a path, a mapping or a list
            without arrays the result is None, because YAML has such values.
        path: keys of a setting that takes Python objects.
    """
    is_list = isinstance(value, tuple | list)
    if isinstance(value, str | PathLike | Mapping) or (is_list and not any(map(is_array, value))):
        return None
    kind = f"{type(value).__name__} of {len(value)}" if is_list else type(value).__name__
    if str(path[-1]).endswith("dataset"):
        return (
            f"a {kind} is no dataset; give arrays (x, y) or (x_train, y_train, x_test, y_test), or "
            "a function that returns them"
        )
    return f"a {kind} is no class or function; give one, uncalled, and its arguments as args"


@dataclass(frozen=True)
class ObjectCode:
    """The byte code of a Python object, and the values and modules that this code uses.

    Attributes:
        code: byte code of functions, and names of classes and types, in the order of use.
        values: numbers and texts in variables that the code uses, as text; they may be private.
        modules: names of the other modules that the code uses.
    """

    code: tuple[str, ...]
    values: tuple[str, ...]
    modules: frozenset[str]

    @property
    def digest(self) -> str:
        """SHA-256 of the code; the same in every process of one version of Python."""
        return hashlib.sha256("\n".join(self.code).encode()).hexdigest()


_MAX_DEPTH = 8  # of lists in lists
_Named = tuple[str, object]


@dataclass
class _Walk:
    """Follows the functions and classes of one module, starting from one of them.

    Attributes:
        home: name of the module.
    """

    home: str | None
    code: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)

    def follow(self, start: Iterable[_Named]) -> None:
        """Add values, and everything that they use, each of them once."""
        waiting, seen = list(start), set[int]()
        if self.home not in (None, "__main__"):
            self.modules.add(str(self.home))
        while waiting:
            name, value = waiting.pop()
            if id(value) in seen and isinstance(value, FunctionType | type):
                continue
            seen.add(id(value))
            if isinstance(value, ModuleType):
                self.modules.add(value.__name__)
            elif isinstance(value, staticmethod | classmethod):
                waiting.append((name, value.__func__))
            elif isinstance(value, property):
                waiting += [(name, part) for part in (value.fget, value.fset) if part is not None]
            elif not isinstance(value, FunctionType | type):
                self._add_value(name, value)
            elif value.__module__ != self.home:
                self.modules.add(str(value.__module__))
            elif isinstance(value, FunctionType):
                self.code.append(f"{name}: {_text(value.__code__)}")
                waiting += _used_by(value)
            else:
                self.code.append(f"{name}: class {value.__qualname__}")
                waiting += [("base", base) for base in value.__bases__]
                waiting += sorted(_members(value), key=lambda member: member[0])

    def _add_value(self, name: str, value: object) -> None:
        if _is_plain(value):
            self.values.append(f"{name} = {value!r}")
        else:
            self.code.append(f"{name}: {type(value).__module__}.{type(value).__qualname__}")


def _used_by(function: FunctionType) -> Iterator[_Named]:
    """Yield the globals, captured variables and default arguments of a function."""
    known = function.__globals__
    yield from ((name, known[name]) for name in _names(function.__code__) if name in known)
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in captured:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _members(kind: type) -> Iterator[_Named]:
    for name, value in vars(kind).items():
        is_code = isinstance(value, FunctionType | staticmethod | classmethod | property)
        if is_code or not name.startswith("__"):
            yield name, value


def _names(code: CodeType) -> list[str]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names(part))]


def _text(code: CodeType) -> str:
    """Return byte code as text, without line numbers and file names."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    consts = [
        _text(const)
        if isinstance(const, CodeType)
        else repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const)
        for const in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_exceptiontable.hex(), names, counts, consts))


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value is a number or a text, or a list or mapping of them."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return True
    if depth == _MAX_DEPTH or not isinstance(value, list | tuple | Mapping):
        return False
    items = [*value, *value.values()] if isinstance(value, Mapping) else value
    return all(_is_plain(item, depth + 1) for item in items)
