"""Whatever is in the file or on the command line: an experiment or an ExperimentError."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsim.experiment import ExperimentError, load_experiment

relaxed = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JARGON = ("Input should", "extra_forbidden", "https://", "union_tag", "discriminator", "pydantic")
TOKENS = (
    "a name data --- ... *a 0x 1e5 .nan \\u \"\\x !%0A [ ] { } , : ? - # & * ! | > ' % @ ` ~ = <"
)
SPACED = "\n|\t| |\r|\x85|\ufeff|&a |!!int |? |: |- |\n  |%TAG ! "
SETTINGS = """
name seed data dataset args partition scheme num_clients alpha model loss federation rounds
weighting local steps optimizer lr privacy delta clients runtime engine path target hidden
0 x << lr:1
"""
PIECES = st.sampled_from([*TOKENS.split(), *SPACED.split("|")])
KEYS = st.sampled_from(SETTINGS.split())
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["digits", "mlp", "iid", "sgd", "adam", "./a.py:f", "a:b", "x.csv", "ray"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def check(error: ExperimentError) -> None:
    """One printable line per problem, in words for people."""
    assert error.problems
    lines = str(error).split("\n")
    assert len(lines) == len(error.problems)
    for line, problem in zip(lines, error.problems, strict=True):
        assert line.isprintable(), repr(line)
        own_words = re.sub(r"'[^']*'", "", problem.message)  # without what the file says itself
        assert not any(word in own_words for word in JARGON), line


def attempt(source: Any, overrides: Any = ()) -> None:
    try:
        load_experiment(source, overrides)
    except ExperimentError as error:
        check(error)


@pytest.mark.slow
@relaxed
@given(content=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "exp.yaml"
    path.write_bytes(content)
    attempt(path)


@pytest.mark.slow
@relaxed
@given(content=st.lists(PIECES, max_size=30).map("".join))
def test_any_yaml_punctuation(tmp_path: Path, content: str) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(content, encoding="utf-8", newline="")
    attempt(path)


@pytest.mark.slow
@relaxed
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5), PIECES), max_size=4))
def test_any_edit_of_a_good_file(tmp_path: Path, good: str, edits: Any) -> None:
    path = tmp_path / "exp.yaml"
    for start, length, piece in edits:
        good = good[:start] + piece + good[start + length :]
    path.write_text(good, encoding="utf-8", newline="")
    attempt(path)


@pytest.mark.slow
@relaxed
@given(
    changes=st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=4), VALUES), max_size=4),
    removed=st.lists(KEYS, max_size=2),
)
def test_any_change_of_a_good_file(good: str, changes: Any, removed: list[str]) -> None:
    mapping = yaml.safe_load(good)
    for key in removed:
        mapping.pop(key, None)
    attempt(mapping, {".".join(path): value for path, value in changes})
    for path, value in changes:
        section = mapping
        with contextlib.suppress(TypeError, KeyError):
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = value
    attempt(mapping)


@pytest.mark.slow
@relaxed
@given(overrides=st.lists(st.text() | st.lists(PIECES | KEYS).map("".join), max_size=3))
def test_any_override(good: str, overrides: list[str]) -> None:
    attempt(yaml.safe_load(good), overrides)
    attempt(yaml.safe_load(good), [f"federation.rounds={value}" for value in overrides])
    attempt(yaml.safe_load(good), [f"{key}=1" for key in overrides])
