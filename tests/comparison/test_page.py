"""The report of a comparison: one accessible file that loads nothing and runs one script."""

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedsim.comparison.comparison_result import ComparisonResult
from fedsim.comparison.figures import looks_of
from fedsim.comparison.figures.variants import fairness, tradeoff
from fedsim.comparison.page import render_comparison, runs_table
from fedsim.comparison.worker import WARNING
from fedsim.report.drawing import inline_svg
from fedsim.runs.files import SCHEMAS

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def page(compared: ComparisonResult) -> str:
    return (compared.path / "comparison.html").read_text()


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_is_loaded(page: str) -> None:
    parsed = Parsed(page)
    assert not {tag for tag, _ in parsed.tags} & {"link", "img", "iframe", "object", "image"}
    for _, attributes in parsed.tags:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "runs/", "figures/")), value
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_policy_allows_exactly_the_script_that_is_there(page: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_headings_come_in_order_and_every_figure_has_words(page: str) -> None:
    parsed = Parsed(page)
    levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    drawings = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(drawings) == 5
    assert all(one["role"] == "img" and len(one["aria-label"] or "") > 30 for one in drawings)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_variant_and_run_is_there_with_its_numbers(
    page: str, compared: ComparisonResult
) -> None:
    for variant in compared.results.variants:
        mean = variant.metrics["test_accuracy"].mean
        assert f'data-value="{mean}">{mean:.1%}' in page
    for run in compared.results.outcomes:
        assert f'href="{run.path}/report.html"' in page
        assert (compared.path / run.path / "report.html").is_file()
    for sentence in (compared.tuning.statement, compared.results.pair_check.statement):
        assert sentence.strip() in html.unescape(page)


def test_private_figures_are_marked_and_absent_unless_asked_for(
    page: str, compared: ComparisonResult
) -> None:
    assert WARNING in html.unescape(page)
    without = replace(
        compared.results,
        variants=tuple(
            replace(
                variant,
                outcomes=tuple(replace(run, client_metrics=()) for run in variant.outcomes),
            )
            for variant in compared.results.variants
        ),
    )
    plain = render_comparison(replace(compared, results=without))
    assert WARNING not in html.unescape(plain)
    assert "on its own data" not in plain


def test_a_pointer_over_a_point_tells_its_numbers(compared: ComparisonResult) -> None:
    picture = tradeoff(compared.results)
    assert picture is not None
    tips = re.findall(r"<title>(.*?)</title>", inline_svg(picture.chart))
    assert len(tips) == 2
    assert tips[0].startswith("plain: ")
    assert tips[1].endswith("at ε ≤ 8")
    points = fairness(compared.results, "client_accuracy")
    assert points is not None
    assert len(re.findall(r"<title>(.*?)</title>", inline_svg(points.chart))) == 2 * 2 * 3


def test_the_same_results_give_the_same_bytes(page: str, compared: ComparisonResult) -> None:
    assert render_comparison(compared) == page


def test_colours_tell_variants_apart(compared: ComparisonResult) -> None:
    one = compared.results.variants[0]
    many = tuple(replace(one, name=f"v{number}") for number in range(20))
    looks = looks_of(replace(compared.results, variants=many))
    assert len({(look.ink, look.dash) for look in looks.values()}) == 20


def test_what_comes_from_files_is_escaped(compared: ComparisonResult) -> None:
    evil = "<script>alert(1)</script>"
    results = replace(compared.results, name=evil)
    page = render_comparison(replace(compared, results=results))
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


def in_browser(path: Path) -> tuple[str, str]:
    """Return the page after its scripts ran, and what the browser logged."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={path.parent / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_a_browser_runs_the_script_and_has_nothing_to_complain_of(
    page: str, tmp_path: Path
) -> None:
    (tmp_path / "comparison.html").write_text(page)
    shown, log = in_browser(tmp_path / "comparison.html")
    assert 'class="sortable"' in shown  # only the script sets it
    assert "CONSOLE" not in log


CLICKS = """<script>
const button = [...document.querySelectorAll("th > button")][COLUMN];
for (let click = 0; click < TIMES; click++) button.click();
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
@pytest.mark.parametrize(
    ("column", "times", "order"),
    [
        (0, 1, ["dp", "plain"]),  # by name
        (2, 1, ["dp", "plain"]),  # by accuracy
        (2, 2, ["plain", "dp"]),
        (1, 2, ["dp", "plain"]),  # no ε is last, whichever way round
    ],
)
def test_a_click_sorts_the_table(
    page: str, tmp_path: Path, column: int, times: int, order: list[str]
) -> None:
    clicks = CLICKS.replace("COLUMN", str(column)).replace("TIMES", str(times))
    open_page = re.sub(r"<meta http-equiv.*?>", "", page).replace("</body>", clicks)
    (tmp_path / "clicked.html").write_text(open_page)
    shown, log = in_browser(tmp_path / "clicked.html")
    table = shown[shown.index("<tbody>") : shown.index("</tbody>")]
    assert re.findall(r'<th scope="row" data-value="(.*?)"', table) == order
    assert "CONSOLE" not in log


def test_a_page_without_privacy_and_with_one_seed_is_whole(compared: ComparisonResult) -> None:
    plain = compared.results.variants[0]
    run = replace(plain.outcomes[0], metrics={"test_accuracy": 0.5})
    alone = replace(plain, outcomes=(run,))
    results = replace(compared.results, variants=(alone,), seeds=(0,))
    page = render_comparison(replace(compared, results=results))
    assert "No variant has a finite ε to draw against" in page
    assert "There is one seed" in page
    assert 'data-value="0.5">50.0%</td>' in page


def test_a_time_that_no_run_recorded_is_not_shown_as_zero(compared: ComparisonResult) -> None:
    plain, private = compared.results.variants
    timed = tuple(replace(run, seconds=2.5) for run in plain.outcomes)
    runs = tuple(replace(run, seconds=0.0) for run in private.outcomes)
    variants = (replace(plain, outcomes=timed), replace(private, outcomes=runs))
    results = replace(compared.results, variants=variants)
    assert results.variants[1].seconds is None
    page = render_comparison(replace(compared, results=results))
    assert "0 ms" not in page
    assert page.count('data-value="">–</td></tr>') == 1 + len(runs)


def test_the_statement_of_a_variant_is_that_of_its_largest_epsilon(
    compared: ComparisonResult, tmp_path: Path
) -> None:
    (tmp_path / "comparison.yaml").touch()
    plain, private = compared.results.variants
    runs = []
    for run, epsilon in zip(private.outcomes, (0.0, 5.0), strict=True):
        path = tmp_path / f"seed-{run.seed}"
        path.mkdir()
        text = json.dumps({"schema": SCHEMAS["privacy.json"], "statement": f"It is {epsilon}."})
        (path / "privacy.json").write_text(text)
        runs.append(replace(run, path=path.name, epsilon=epsilon))
    variants = (plain, replace(private, outcomes=tuple(runs)))
    results = replace(compared.results, variants=variants)
    page = render_comparison(replace(compared, results=results, path=tmp_path))
    assert "It is 5.0." in page
    assert "It is 0.0." not in page


def test_a_failed_run_of_a_private_variant_is_not_called_one_without_privacy(
    compared: ComparisonResult,
) -> None:
    plain, private = compared.results.variants
    runs = tuple(replace(run, status="failed", epsilon=None) for run in private.outcomes[:1])
    outcomes = (*runs, *private.outcomes[1:])
    results = replace(compared.results, variants=(plain, replace(private, outcomes=outcomes)))
    cells = [row["cells"] for row in runs_table(results)["rows"]]
    guarantees = {
        (row[1][1], text) for row in cells for heading, text, _ in row if heading[0] == "g"
    }
    assert guarantees == {("completed", "none"), ("failed", "–"), ("completed", "ε ≤ 8")}


def test_ten_thousand_clients_are_drawn_small(compared: ComparisonResult) -> None:
    plain, private = compared.results.variants
    run = private.outcomes[0]
    many = replace(
        run,
        clients=tuple({"client": c, "epsilon": 1 + c / 1e4} for c in range(10_000)),
        client_metrics=tuple(
            {"client": c, "examples": 5, "client_accuracy": (c % 97) / 97} for c in range(10_000)
        ),
    )
    results = replace(
        compared.results, variants=(plain, replace(private, outcomes=(many, many, many)))
    )
    page = render_comparison(replace(compared, results=results))
    assert len(page) < 2_000_000
