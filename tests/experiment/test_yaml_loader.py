import math

import pytest

from fedsim.experiment import ExperimentError, Problem
from fedsim.experiment.yaml_loader import core_scalar, parse_yaml, to_python

# Plain scalars under the YAML 1.2 core schema; the comment says what YAML 1.1 makes of them.
SCALARS = {
    "1e-5": 1e-5,  # a string
    "1.0e-5": 1e-5,
    "1E3": 1000.0,  # a string
    "-1.5e+2": -150.0,
    ".5": 0.5,
    "5.": 5.0,
    "+.5": 0.5,
    "010": 10,  # 8
    "0o17": 15,  # a string
    "0x1F": 31,
    "-0": 0,
    "+12": 12,
    "0": 0,
    "yes": "yes",  # True
    "no": "no",  # False
    "on": "on",  # True
    "off": "off",  # False
    "y": "y",
    "true": True,
    "True": True,
    "FALSE": False,
    "tRUE": "tRUE",
    "null": None,
    "Null": None,
    "~": None,
    "nULL": "nULL",
    "12:30:00": "12:30:00",  # 45000
    "2001-01-01": "2001-01-01",  # a date
    "1_000": "1_000",  # 1000
    "0b11": "0b11",  # 3
    "-0x1F": "-0x1F",  # -31
    "1e": "1e",
    ".": ".",
    "e5": "e5",
    "=": "=",
    "<<": "<<",
    "٣": "٣",  # a digit, but not one of YAML's
    "'010'": "010",
    '"1e-5"': "1e-5",
    "'true'": "true",
    '"\\u03b5"': "ε",
    ".inf": math.inf,
    "-.INF": -math.inf,
    "+.Inf": math.inf,
    "-.nan": "-.nan",
}


def parse(text: str | bytes) -> tuple[object, list[str]]:
    problems: list[Problem] = []
    value = to_python(parse_yaml(text, "f.yaml", problems))
    return value, [str(problem) for problem in problems]


@pytest.mark.parametrize(("text", "expected"), SCALARS.items())
def test_core_scalars(text: str, expected: object) -> None:
    value, problems = parse(f"key: {text}\n")
    assert not problems
    assert value == {"key": expected}
    assert isinstance(value, dict)
    assert type(value["key"]) is type(expected)


def test_nan_and_nothing() -> None:
    nan = core_scalar(".nan")
    assert isinstance(nan, float)
    assert math.isnan(nan)
    assert parse("a:\nb: 1\n")[0] == {"a": None, "b": 1}


@pytest.mark.parametrize("key", ["yes", "on", "no", "12:30:00", "'1'", "<<"])
def test_keys_that_are_strings(key: str) -> None:
    assert parse(f"{key}: 1\n") == ({key.strip("'"): 1}, [])


def test_block_scalars_are_strings() -> None:
    assert parse("a: |\n  1\n  2\nb: >\n  3\n")[0] == {"a": "1\n2\n", "b": "3\n"}


def test_every_key_has_its_position() -> None:
    tree = parse_yaml("a: 1\nb:\n  - x\n  - {c: 2, ε: 3}\n", "f.yaml", [])
    keys = {("a",): (1, 1), ("b",): (2, 1), ("b", 1, "c"): (4, 6), ("b", 1, "ε"): (4, 12)}
    for path, position in keys.items():
        *_, (location, _) = tree.places_on(path)
        assert (location.source, location.line, location.column) == ("f.yaml", *position)


def test_what_is_not_there_is_located_at_what_lacks_it() -> None:
    tree = parse_yaml("a: 1\nb:\n  c: 2\n", "f.yaml", [])
    assert [*tree.places_on(("b", "d", "e"))] == [*tree.places_on(("b",))]


def test_an_alias_repeats_a_value_where_it_was_written() -> None:
    tree = parse_yaml("a: &x {k: [1]}\nb: *x\n", "f.yaml", [])
    assert to_python(tree) == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert [location.line for location, _ in tree.places_on(("b", "k"))] == [1, 2, 1]


def test_an_alias_may_be_a_key() -> None:
    assert parse("a: &x text\n*x : 1\n") == ({"a": "text", "text": 1}, [])


def test_recoverable_problems_are_collected_and_the_first_duplicate_counts() -> None:
    value, problems = parse("a: 1\na: 2\n3: x\ntrue: x\nb: !!set {c}\n~: x\n")
    assert value == {"a": 1, "b": {"c": None}}
    assert problems == [
        "f.yaml:2:1: a: duplicate key; it is already on line 1",
        'f.yaml:3:1: 3: a key must be a string; write "3"',
        'f.yaml:4:1: true: a key must be a string; write "true"',
        "f.yaml:5:4: b: tag !!set is not allowed; write the value",
        'f.yaml:6:1: null: a key must be a string; write "null"',
    ]


FATAL = {
    "": "1:1: the file is empty",
    "# nothing\n": "1:1: the file is empty",
    "a: 1\n---\nb: 2\n": "2:1: a second document starts here; a file holds one",
    "a: &x [*x]\n": "1:8: a.0: alias *x contains itself",
    "a: &x {b: {c: *x}}\n": "1:15: a.b.c: alias *x contains itself",
    "a: *x\n": "1:4: a: alias *x has no anchor &x before it",
    "[a]: 1\n": "1:1: a key must be a string",
    "? {a: 1}\n: 1\n": "1:3: a key must be a string",
    "a: b\x07\n": "1:5: character U+0007 is not allowed in YAML",
    "a: 1 # c\x85b: 2\n": "1:9: character U+0085 is not allowed in YAML",
    "a: 1\r\nb: c\u2028\r\n": "2:5: character U+2028 is not allowed in YAML",
    "a: \ud800\n": "1:4: character U+D800 is not allowed in YAML",
    'a: "\\ud800"\n': "1:4: a: is not valid Unicode text",
    'a: "\\UFFFFFFFF"\n': "1:7: not valid YAML: bad number",
    "a: " + "9" * 5000: "1:4: a: number with too many digits",
    "a: 0x" + "f" * 5000: "1:4: a: number with too many digits",
    "a: " + "[" * 5000: "1:68: nested too deeply",
    "a:\n\tb: 1\n": "2:1: not valid YAML: a tab cannot be used here; indent with spaces",
    "a: b: c\n": "1:5: not valid YAML: ':' is not allowed here; check the indentation above",
    'a: "b\n': "1:4: not valid YAML: the quote opened here is never closed",
    "a: [1, 2\nb: 3\n": "2:2: not valid YAML: expected ',' or ']'; is the list closed?",
    "a: {b: 1\nc: 3\n": "2:2: not valid YAML: expected ',' or '}'; is the mapping closed?",
    "a:\n  b: 1\n c: 2\n": "3:2: not valid YAML: the indentation does not fit the lines above",
    "a: [": "1:5: not valid YAML: a value is missing here",
}


@pytest.mark.parametrize(("text", "expected"), FATAL.items())
def test_what_is_no_document_is_one_located_error(text: str, expected: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse_yaml(text, "f.yaml", [])
    assert str(caught.value) == f"f.yaml:{expected}"


def test_bytes_must_be_utf8() -> None:
    with pytest.raises(ExperimentError, match=r"^f.yaml:2:7: the file is not UTF-8 text$"):
        parse_yaml(b"a: 1\nb: caf\xe9\n", "f.yaml", [])
    with pytest.raises(ExperimentError, match=r"^f.yaml:1:6: the file is not UTF-8 text$"):
        parse("a: éé".encode("utf-8-sig") + b"\xe9")
    assert parse("a: ε\n".encode("utf-8-sig"))[0] == {"a": "ε"}


def test_aliases_cannot_make_a_small_file_huge() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    with pytest.raises(ExperimentError, match=r"f.yaml:5:55: a4: more than 100,000 values"):
        parse_yaml("\n".join(lines), "f.yaml", [])


def test_problems_found_before_the_fatal_one_are_kept() -> None:
    problems: list[Problem] = []
    with pytest.raises(ExperimentError) as caught:
        parse_yaml("a: 1\na: 2\nb: [\n", "f.yaml", problems)
    assert [problem.line for problem in caught.value.problems] == [2, 4]


def test_a_name_of_an_anchor_may_be_given_again() -> None:
    assert parse("a: &x 1\nb: *x\nc: &x 2\nd: *x\n")[0] == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_the_tag_that_forces_a_string_is_refused() -> None:
    assert parse("a: ! 12\n")[1] == ["f.yaml:1:4: a: tag ! is not allowed; write the value"]
