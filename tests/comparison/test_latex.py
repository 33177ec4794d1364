"""`comparison.tex` compiles: every character that LaTeX reads as a command is escaped."""

import re
from dataclasses import replace

from fedsim.comparison.comparison_result import ComparisonResult, escape_latex, latex_tables


def test_the_table_has_a_line_for_each_variant_with_its_numbers(compared: ComparisonResult) -> None:
    text = (compared.path / "comparison.tex").read_text()
    assert text == latex_tables(compared.results)
    plain, dp = re.findall(r"^(?:plain|dp) & .*\\\\$", text, re.MULTILINE)
    mean = compared.results.variants[1].metrics["test_accuracy"].mean
    assert plain.startswith("plain & -- & $")
    assert plain.endswith(r"& -- & -- \\")
    assert dp.startswith(rf"dp & $\le 8$ & ${100 * mean:.1f} \pm ")
    assert r"variant & $\varepsilon$ & test accuracy (\%) & minus plain (pp) & $p$ \\" in text
    assert text.count(r"\begin{tabular}{lrrrr}") == text.count(r"\end{tabular}") == 1
    assert all(line.count("&") == 4 for line in (plain, dp))


def test_names_are_escaped_and_different_deltas_are_a_column(compared: ComparisonResult) -> None:
    assert escape_latex(r"a_b&50%#{x}^~\$") == (
        r"a\_b\&50\%\#\{x\}\textasciicircum{}\textasciitilde{}\textbackslash{}\$"
    )
    plain, dp = compared.results.variants
    runs = tuple(replace(run, delta=1e-5) for run in dp.outcomes)
    other = replace(dp, name="dp_2", outcomes=runs)
    text = latex_tables(replace(compared.results, variants=(plain, dp, other)))
    assert r"dp\_2 & $\le 8$ & $10^{-5}$" in text
    assert r"$0.0001$" in text
