"""The report as a reader gets it: complete, self-contained, escaped, and the same every time."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from fedsim.report.client_table import aligned_epsilon
from fedsim.report.html import write_report
from fedsim.run_directory import RunDirectory, RunDirectoryError

VOID = {"meta", "br", "hr", "img", "link", "input"}
LIMIT = 500_000

RUNS: dict[str, dict[str, Any]] = {
    "private": {},
    "plain": {"private": False},
    "regression": {"task": "regression", "target": 2.0},
    "noise was given": {"target": None},
    "300 clients": {"clients": 300},
    "one round, then failed": {"rounds": 1, "status": "failed"},
    "interrupted at once": {"rounds": 0, "status": "interrupted"},
    "plain, interrupted at once": {"rounds": 0, "status": "interrupted", "private": False},
}


class Page(HTMLParser):
    """A parsed report that insists on closed tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def names(self) -> set[str]:
        return {name for name, _ in self.tags}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.words.append(data)


def report_of(directory: RunDirectory) -> str:
    write_report(directory)
    return directory.report.read_text(encoding="utf-8")


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
class TestEveryReport:
    def test_parses_and_is_small(self, make_run, settings):
        html = report_of(make_run(**settings))
        assert Page(html).names() >= {"html", "title", "h1", "main", "footer"}
        assert len(html.encode()) < LIMIT

    def test_loads_nothing_and_runs_nothing(self, make_run, settings):
        html = report_of(make_run(**settings))
        page = Page(html)
        assert not page.names() & {"script", "link", "img", "iframe", "object", "base", "image"}
        for _, attributes in page.tags:
            for name, value in attributes.items():
                assert not name.startswith("on")
                if name in {"src", "href", "xlink:href"}:
                    assert (value or "").startswith("#")
        assert "http:" not in html
        assert "https:" not in html
        assert "@import" not in html
        assert not re.search(r"url\((?!#)", html)

    def test_gives_the_same_bytes_again(self, make_run, settings):
        directory = make_run(**settings)
        assert report_of(directory) == report_of(directory)

    def test_has_ids_once_and_every_reference_resolves(self, make_run, settings):
        html = report_of(make_run(**settings))
        ids = [value for _, tag in Page(html).tags for name, value in tag.items() if name == "id"]
        assert len(ids) == len(set(ids))
        references = re.findall(r'xlink:href="#([^"]+)"', html) + re.findall(r"url\(#([^)]+)", html)
        assert set(references) <= set(ids)

    def test_draws_in_the_colours_of_the_page(self, make_run, settings):
        html = report_of(make_run(**settings))
        drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
        declared = set(re.findall(r"(--\w+):", html))
        for drawing in drawings:
            assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawing)
            assert set(re.findall(r"var\((--\w+)\)", drawing)) <= declared
            assert all("fill: var(--" in text for text in re.findall(r"<text[^>]*>", drawing))

    def test_repeats_the_statement_and_the_settings(self, make_run, settings):
        directory = make_run(**settings)
        page = Page(report_of(directory))
        assert directory.read_json("privacy.json")["statement"] in page.text
        assert "scheme: dirichlet" in page.text
        assert "425ad13f" in page.text
        assert directory.read_json("summary.json")["status"] in page.text


def test_private_run_names_every_spend(make_run):
    directory = make_run()
    page = Page(report_of(directory))
    for spend in directory.read_json("privacy.json")["clients"]:
        assert aligned_epsilon(spend["epsilon"]) in page.text
        assert aligned_epsilon(spend["epsilon_rdp"]) in page.text
    assert "at δ = 0.001, largest of 10 clients" in page.text
    assert "In plain words" in page.text
    assert "No amplification is claimed." in page.text


def test_many_clients_are_cut_to_the_largest_spends(make_run):
    directory = make_run(clients=300)
    html = report_of(directory)
    epsilons = sorted(s["epsilon"] for s in directory.read_json("privacy.json")["clients"])
    assert html.count('<td class="epsilon">') == 100
    assert "The 100 clients with the largest ε of 300" in Page(html).text
    assert "clients.csv" in html
    assert aligned_epsilon(epsilons[-1]) in html


def test_plain_federation_claims_nothing(make_run):
    page = Page(report_of(make_run(private=False)))
    assert "no differential privacy" in page.text
    assert "ε" not in page.text
    assert "Recompute" not in page.text


def test_regression_leads_with_r2(make_run):
    page = Page(report_of(make_run(task="regression")))
    assert "Test R²" in page.text
    assert "mean squared error" in page.text


def test_nothing_finished_is_said(make_run):
    page = Page(report_of(make_run(rounds=0, status="interrupted")))
    assert "no round was finished" in page.text
    assert "ε = 0" in page.text
    assert "svg" not in page.names()


def test_infinite_epsilon_warns_and_does_not_interpret(make_run, private_client):
    spends = [private_client(0, 100, 2.0, 5), private_client(1, 100, None, 5)]
    page = Page(report_of(make_run(clients=spends, rounds=5)))
    assert "ε is infinite. Client 1 released updates" in page.text
    assert "ε = ∞" in page.text
    assert "In plain words" not in page.text


def test_every_epsilon_infinite(make_run, private_client):
    spends = [private_client(number, 100, None, 5) for number in range(3)]
    assert "Clients 0, 1, 2 released" in Page(report_of(make_run(clients=spends, rounds=5))).text


def test_loose_delta_names_its_clients(make_run, private_client):
    sizes = (999, 1000, 2000)  # δ is 1/1000
    spends = [private_client(number, size, 2.0, 5) for number, size in enumerate(sizes)]
    page = Page(report_of(make_run(clients=spends, rounds=5)))
    assert "δ is not below 1 / examples. This concerns clients 1, 2." in page.text


def test_metrics_that_diverged_leave_gaps(make_run, make_rounds):
    rows = make_rounds(6, [], private=False, task="classification")
    for row in rows:
        row["test_loss"] = None
    rows[2]["test_accuracy"] = None
    html = report_of(make_run(private=False, rounds=rows))
    assert "loss not finite" in Page(html).text
    assert html.count("<svg") == 1


def test_hostile_text_is_escaped(make_run, make_rounds):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
    rows = make_rounds(3, [], private=False, task="classification")
    rows[1]["failed"] = [{"client": 4, "reason": attack}]
    html = report_of(make_run(name=attack, rounds=rows, private=False, status="failed"))
    page = Page(html)
    assert not page.names() & {"script", "img"}
    assert page.text.count(attack) >= 3  # title, heading, reason


def test_undecodable_text_does_not_lose_the_report(make_run, make_rounds):
    rows = make_rounds(1, [], private=False, task="classification")
    rows[0]["failed"] = [{"client": 0, "reason": "cannot open 'caf\udce9.npz'"}]
    assert "caf?.npz" in report_of(make_run(rounds=rows, private=False))


def test_failures_and_withdrawals_are_listed(make_run, make_rounds):
    rows = make_rounds(5, [], private=False, task="classification")
    rows[1]["failed"] = [{"client": 4, "reason": "RuntimeError: out of memory"}]
    rows[3]["withdrawn"] = [{"client": 2, "reason": "target ε = 1 affords 9 steps"}]
    text = Page(report_of(make_run(rounds=rows))).text
    assert "2 4 RuntimeError: out of memory" in text
    assert "4 2 withdrew: target ε = 1 affords 9 steps" in text


def test_stays_small_however_long_and_troubled_the_run(make_run, make_rounds, private_client):
    spends = [private_client(number, 100, 1 + number / 1000, 3000) for number in range(2000)]
    rows = make_rounds(3000, spends[:1], private=True, task="classification")
    for row in rows:
        row["failed"] = [{"client": 1, "reason": "no route to host " * 100}]
    html = report_of(make_run(clients=spends, rounds=rows))
    assert len(html.encode()) < LIMIT
    assert "The first 100 of 3000" in Page(html).text


def test_users_matplotlib_settings_change_nothing(make_run):
    import matplotlib

    directory = make_run()
    expected = report_of(directory)
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert report_of(directory) == expected
        assert dict(matplotlib.rcParams) == before


def test_unfinished_run_is_refused_with_the_reason(make_run):
    directory = make_run()
    (directory.path / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"has no summary\.json: the run is still going on"):
        write_report(directory)
