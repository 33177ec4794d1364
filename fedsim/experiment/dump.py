"""An experiment with every default: as YAML, or as one value for each key."""

import sys
from collections.abc import Iterator

import yaml

from fedsim.experiment.schema import Experiment
from fedsim.experiment.shapes import Shape, TaggedUnion, child_shape
from fedsim.experiment.yaml_loader import CORE_PATTERNS


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every string that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def dump_experiment(experiment: Experiment) -> str:
    """Return the YAML of an experiment with its defaults, in the order of the schema.

    `load_experiment` reads it back to an equal `Experiment`. Relative paths are kept, so the text
    is valid only in the experiment's own directory.
    """
    return yaml.dump(
        experiment.model_dump(),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=sys.maxsize,
    )


def flat_settings(experiment: Experiment) -> dict[str, object]:
    """Return all settings as `{"key.path": value}`; lists stay whole.

    The name of a choice is the value of its key, `privacy.clipping`; its own keys, such as
    `privacy.clipping.quantile`, are there where they have another value than their default.
    """
    return dict(_leaves(experiment.model_dump(mode="json"), "", Experiment))


def _leaves(content: object, path: str, shape: Shape) -> Iterator[tuple[str, object]]:
    if not isinstance(content, dict) or not content:
        yield path, content
        return
    if isinstance(shape, TaggedUnion) and shape.takes_name:
        yield path, content[shape.tag]
        chosen = shape.variants[content[shape.tag]]
        content = {
            key: one
            for key, one in content.items()
            if key != shape.tag and one != chosen.model_fields[key].default
        }
        shape = chosen
    for key, one in content.items():
        yield from _leaves(one, f"{path}.{key}" if path else str(key), child_shape(shape, key))


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape characters that are not printable, such as line breaks.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[object]) -> yaml.SequenceNode:
    flow = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(str, _represent_string)
_Dumper.add_representer(list, _represent_list)
for _kind, _pattern in CORE_PATTERNS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)
