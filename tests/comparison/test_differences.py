"""Settings that differ stand in a table; what texts share is written once."""

from fedsim.comparison.differences import setting_text, settings_table, shared_text

PLAIN = {"privacy": None, "local.steps": 1, "data.partition.scheme": "iid"}
DP = {
    "privacy.target_epsilon": 8.0,
    "privacy.delta": 1e-5,
    "local.steps": 1,
    "data.partition.scheme": "iid",
}


def test_only_keys_that_differ_are_shown_and_equal_ones_are_not() -> None:
    found = settings_table({"a": DP, "b": {**DP, "local.steps": 2}})
    assert found.keys == ("local.steps",)
    assert found.values == {"a": {"local.steps": 1}, "b": {"local.steps": 2}}


def test_a_section_that_one_lacks_is_one_key_and_its_keys_are_compared_among_the_others() -> None:
    strong = {**DP, "privacy.target_epsilon": 2.0}
    found = settings_table({"dp": DP, "plain": PLAIN, "strong": strong})
    assert found.keys == ("privacy", "privacy.target_epsilon")
    assert [found.texts[name]["privacy"] for name in ("plain", "dp", "strong")] == [
        "null",
        "given",
        "given",
    ]
    assert [found.texts[name]["privacy.target_epsilon"] for name in ("plain", "dp")] == ["–", "8.0"]


def test_a_key_of_another_scheme_differs_from_its_absence() -> None:
    other = {**PLAIN, "data.partition.scheme": "dirichlet", "data.partition.alpha": 0.5}
    found = settings_table({"a": PLAIN, "b": other})
    assert found.keys == ("data.partition.scheme", "data.partition.alpha")
    assert found.texts["a"]["data.partition.alpha"] == "–"


def test_values_are_short_yaml() -> None:
    assert setting_text(None) == "null"
    assert setting_text([1, {"a": "x"}]) == "[1, {a: x}]"
    assert len(setting_text(list(range(100)))) == 60


def test_texts_of_one_form_are_written_once_with_their_words_in_a_table() -> None:
    found = shared_text(
        [("a", "ε is 8 at δ = 1e-5. All is well."), ("b", "ε is 2 at δ = 1e-6. All is well.")]
    )
    assert found.common == "ε is [A] at δ = [B]. All is well."
    assert found.letters == ("A", "B")
    assert found.words == (("a", ("8", "1e-5")), ("b", ("2", "1e-6")))
    assert not found.rest


def test_texts_of_other_forms_share_sentences_and_one_text_stays_whole() -> None:
    found = shared_text([("a", "Same here. One thing."), ("b", "Same here. Quite another thing.")])
    assert found.common == "Same here."
    assert found.rest == (("a", "One thing."), ("b", "Quite another thing."))
    assert shared_text([("a", "Alone.")]).rest == (("a", "Alone."),)
    same = shared_text([("a", "Equal."), ("b", "Equal.")])
    assert (same.common, same.words, same.rest) == ("Equal.", (), ())


def test_among_some_variants_only_what_differs_there_is_left() -> None:
    found = settings_table({"plain": PLAIN, "dp": DP, "more": {**DP, "local.steps": 2}})
    assert found.keys == ("privacy", "local.steps")
    assert found.among(["dp", "more"]).keys == ("local.steps",)
    assert found.among(["plain", "dp", "unknown"]).keys == ("privacy",)
