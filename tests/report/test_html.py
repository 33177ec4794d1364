"""The report as a reader gets it: complete, self-contained, escaped, and the same every time."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from typing import Any

import pytest

from fedsim.core.formatting import aligned_epsilon, epsilon_text
from fedsim.report.client_table import ClientTable
from fedsim.report.html import write_report
from fedsim.runs.directory import RunDirectory, RunDirectoryError

INLINE = {"b", "code", "sub", "a"}
VOID = {"meta", "br", "hr", "img", "link", "input"}
LIMIT = 500_000
NO_EPSILON = re.compile(r"ε\s*[≤<=]+\s*\d|at δ|\(ε")

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
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

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
        if tag not in INLINE:
            self.words.append(" ")

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.words.append(data)


def plain(text: str) -> str:
    """Return a sentence as it reads on the page, where code and indices have marks of their own."""
    return text.replace("`", "").replace("ε_k", "εk")


def report_of(directory: RunDirectory) -> str:
    write_report(directory)
    return directory.report.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=RUNS.values(), ids=list(RUNS))
def run(request, tmp_path_factory, write_run):
    """Return a run directory of each kind with its report."""
    directory = write_run(tmp_path_factory.mktemp("run") / "r", **request.param)
    write_report(directory)
    return directory


class TestEveryReport:
    def test_parses_and_is_small(self, run):
        html = run.report.read_text(encoding="utf-8")
        assert Page(html).names() >= {"html", "title", "h1", "main", "footer"}
        assert len(html.encode()) < LIMIT

    def test_loads_nothing_and_runs_only_its_own_script(self, run):
        html = run.report.read_text(encoding="utf-8")
        page = Page(html)
        assert not page.names() & {"link", "img", "iframe", "object", "base", "image", "embed"}
        for _, attributes in page.tags:
            for name, value in attributes.items():
                assert not name.startswith("on")
                assert name != "src"
                if name in {"href", "xlink:href", "action", "formaction"}:
                    assert (value or "").startswith("#")
        assert "http:" not in html
        assert "https:" not in html
        assert "@import" not in html
        assert not re.search(r"url\((?!#)", html)
        scripts = [tag for name, tag in page.tags if name == "script"]
        assert [tag for tag in scripts if tag.get("type") != "application/json"] == [{}]
        digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
        policy = next(tag["content"] for name, tag in page.tags if "http-equiv" in tag)
        expected = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        assert policy == expected

    def test_can_be_read_without_seeing_it(self, run):
        page = Page(run.report.read_text(encoding="utf-8"))
        levels = [int(name[1]) for name, _ in page.tags if re.fullmatch(r"h[1-6]", name)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        ids = {tag["id"] for _, tag in page.tags if "id" in tag}
        for name, tag in page.tags:
            if name == "th":
                assert tag.get("scope") in {"col", "row"}
            if name == "svg":
                assert tag["role"] == "img"
                assert len(tag["aria-label"] or "") > 10
            if name == "a":
                assert (tag["href"] or "")[1:] in ids
            for reference in ("aria-labelledby", "for"):
                assert tag.get(reference, "") in {*ids, ""}
            if tag.get("tabindex"):
                assert name == "pre" or tag.get("aria-label")

    def test_gives_the_same_bytes_again(self, run):
        assert run.report.read_text(encoding="utf-8") == report_of(run)

    def test_has_ids_once_and_every_reference_resolves(self, run):
        html = run.report.read_text(encoding="utf-8")
        ids = [value for _, tag in Page(html).tags for name, value in tag.items() if name == "id"]
        assert len(ids) == len(set(ids))
        references = re.findall(r'xlink:href="#([^"]+)"', html) + re.findall(r"url\(#([^)]+)", html)
        assert set(references) <= set(ids)

    def test_draws_in_the_colours_of_the_page(self, run):
        html = run.report.read_text(encoding="utf-8")
        drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
        declared = set(re.findall(r"(--\w+):", html))
        for drawing in drawings:
            assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawing)
            assert set(re.findall(r"var\((--\w+)\)", drawing)) <= declared
            assert all("fill: var(--" in text for text in re.findall(r"<text[^>]*>", drawing))

    def test_repeats_the_statement_and_the_settings(self, run):
        page = Page(run.report.read_text(encoding="utf-8"))
        for point in run.read_json("privacy.json")["statement_points"]:
            assert plain(point["text"]) in page.text
        assert "scheme: dirichlet" in page.text
        assert "425ad13f" in page.text
        assert run.read_json("summary.json")["status"] in page.text


def test_private_run_names_every_spend(make_run):
    directory = make_run()
    page = Page(report_of(directory))
    for spend in directory.read_json("privacy.json")["clients"]:
        assert aligned_epsilon(spend["epsilon"]) in page.text
        assert aligned_epsilon(spend["epsilon_rdp"]) in page.text
    assert "at δ = 0.001, largest of 10 clients" in page.text
    assert "What an attacker can gain" in page.text
    assert "No amplification is claimed." in page.text


def test_many_clients_are_all_there_for_the_script_and_100_without_it(make_run):
    directory = make_run(clients=300)
    html = report_of(directory)
    page = Page(html)
    clients = directory.read_json("privacy.json")["clients"]
    largest = max(spend["epsilon"] for spend in clients)
    assert html.count('<td class="epsilon">') == 100
    assert "The 100 clients with the largest ε of 300" in page.text
    assert "clients.csv" in html
    columns = columns_of(page)
    assert columns["client"] == list(range(300))
    first = re.search(r'<td class="epsilon">(.*?)</td>', html)
    assert first is not None
    assert first[1] == aligned_epsilon(largest)
    by_client = {spend["client"]: spend for spend in clients}
    for client, epsilon in zip(columns["client"], columns["epsilon"], strict=True):
        assert epsilon == aligned_epsilon(by_client[client]["epsilon"])


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


def test_the_page_says_how_a_run_ended(make_run):
    assert "The run failed. every client failed" in Page(report_of(make_run(status="failed"))).text
    directory = make_run(status="stopped")
    summary = directory.read_json("summary.json")
    directory.write_json("summary.json", {**summary, "reason": "every budget is spent"})
    assert "The run stopped early. every budget is spent" in Page(report_of(directory)).text


def test_a_federation_without_a_bound_states_no_finite_guarantee_anywhere(
    make_run, private_client, make_rounds
):
    spends = [private_client(0, 100, 2.0, 5), private_client(1, 100, None, 5)]
    rows = make_rounds(5, spends, private=True, task="classification")  # ε was finite at first
    directory = make_run(clients=spends, rounds=rows)
    html = report_of(directory)
    page = Page(html)
    assert "ε is infinite. Client 1 released updates" in page.text
    assert "ε = ∞" in page.text
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert not [drawing for drawing in drawings if "Largest ε" in drawing]
    assert "attacker" not in page.text
    assert "μ" not in page.text
    # What is left of ε are the columns of clients, and the client whose own ε is finite.
    assert not NO_EPSILON.findall(page.text)
    statement = directory.read_json("privacy.json")
    assert statement["profile"] is None
    assert not NO_EPSILON.findall(statement["statement"])
    assert {s["kind"] for s in statement["statement_points"]} == {"warning", "fact", "limit"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sampling", "shuffle"),
        ("sampling", "my_own"),
        ("sampling", None),
        ("noise", None),
        ("adjacency", "edit_distance"),
        ("accountant", "central_limit"),
    ],
)
def test_an_epsilon_that_the_facts_do_not_support_is_not_repeated(make_run, key, value):
    directory = make_run()
    directory.write_json("privacy.json", {**directory.read_json("privacy.json"), key: value})
    page = Page(report_of(directory))
    assert "No guarantee can be stated. An ε is reported for this run, but " in page.text
    assert not NO_EPSILON.findall(page.text)


def test_an_epsilon_smaller_than_its_ledger_is_not_repeated(make_run):
    directory = make_run()
    privacy = directory.read_json("privacy.json")
    for spend in privacy["clients"]:
        spend["epsilon"] /= 2
    directory.write_json("privacy.json", privacy)
    page = Page(report_of(directory))
    assert "is smaller than the ε of its ledger" in page.text
    assert not NO_EPSILON.findall(page.text)


def test_the_largest_epsilon_is_that_of_the_clients_whatever_else_is_written(make_run):
    directory = make_run()
    privacy = directory.read_json("privacy.json")
    directory.write_json(
        "privacy.json", {**privacy, "system_epsilon": 0.1, "statement": "ε = 0.1 for ever"}
    )
    page = Page(report_of(directory))
    largest = max(spend["epsilon"] for spend in privacy["clients"])
    assert f"ε ≤ {epsilon_text(largest)}" in page.text
    assert "0.1 for ever" not in page.text


def test_declared_sizes_are_not_passed_off_as_true_ones(make_run):
    directory = make_run()
    privacy = directory.read_json("privacy.json")
    directory.write_json("privacy.json", {**privacy, "adjacency": "add_remove"})
    assert "declared examples" in Page(report_of(directory)).text
    assert "declared" not in Page(report_of(make_run())).text


def test_every_epsilon_infinite(make_run, private_client):
    spends = [private_client(number, 100, None, 5) for number in range(3)]
    assert "Clients 0, 1, 2 released" in Page(report_of(make_run(clients=spends, rounds=5))).text


def test_loose_delta_names_its_clients(make_run, private_client):
    sizes = (999, 1000, 2000)  # δ is 1/1000
    spends = [private_client(number, size, 2.0, 5) for number, size in enumerate(sizes)]
    page = Page(report_of(make_run(clients=spends, rounds=5)))
    assert "δ is not below 1 / examples for clients 1, 2." in page.text


def test_metrics_that_diverged_leave_gaps(make_run, make_rounds):
    rows = make_rounds(6, [], private=False, task="classification")
    for row in rows:
        row["test_loss"] = None
    rows[2]["test_accuracy"] = None
    html = report_of(make_run(private=False, rounds=rows))
    assert "loss not finite" in Page(html).text
    assert html.count("<svg") == 3  # accuracy by round, bytes and time


def test_hostile_text_is_escaped(make_run, make_rounds):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
    rows = make_rounds(3, [], private=False, task="classification")
    rows[1]["failed"] = [{"client": 4, "reason": attack}]
    html = report_of(make_run(name=attack, rounds=rows, private=False, status="failed"))
    page = Page(html)
    assert "img" not in page.names()
    assert [name for name, _ in page.tags].count("script") == 2  # the page's own, and its data
    assert page.text.count(attack) >= 3  # title, heading, reason


def test_the_data_of_the_script_cannot_end_it():
    attack = "</script><script>alert(1)</script><!--"
    headings = {"client": "client", "name": "name", "epsilon": "ε", "notes": "notes"}
    table = ClientTable(headings, {(attack, attack): (3,)}, (), "epsilon", (), {3: attack})
    text = str(table.to_json())
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text)["kinds"][0][0] == json.loads(text)["names"]["3"] == attack


def test_clients_of_one_kind_share_their_cells(make_run, private_client):
    """100,000 clients of some kinds are a page of less than a megabyte."""
    alike = [private_client(number, 100, 4.0 + number % 3, 5) for number in range(3000)]
    html = report_of(make_run(clients=alike, rounds=5))
    data = json.loads(Page(html).scripts[0])
    assert len(data["kinds"]) == 3
    assert len(json.dumps(data, separators=(",", ":"))) < 3 * 3000
    epsilons = columns_of(Page(html))["epsilon"]
    assert epsilons == [aligned_epsilon(4.0 + number % 3) for number in range(3000)]


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


def test_withdrawals_with_reasons_and_phases_of_rounds_are_shown(make_run, make_rounds):
    rows = make_rounds(4, [], private=False, task="classification")
    rows[2]["withdrawn"] = [{"client": 2, "reason": "<b>budget</b>"}]
    for row in rows:
        row["timeline"] = {"train": 0.9, "sample": 0.1}
    text = Page(report_of(make_run(rounds=rows))).text
    assert "3 2 withdrew: <b>budget</b>" in text
    assert "train 3.6 s 72.9%" in text  # of 4.936 s in all


@pytest.mark.slow
def test_stays_small_however_long_and_troubled_the_run(make_run, make_rounds, private_client):
    spends = [private_client(number, 100, 1 + number / 1000, 1000) for number in range(500)]
    rows = make_rounds(1000, spends[:1], private=True, task="classification")
    for row in rows:
        row["failed"] = [{"client": 1, "reason": "no route to host " * 100}]
    html = report_of(make_run(clients=spends, rounds=rows))
    assert len(html.encode()) < LIMIT  # all 500 clients are in it
    assert "The first 100 of 1000" in Page(html).text


def test_unfinished_run_is_refused_with_the_reason(make_run):
    directory = make_run()
    (directory.path / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match=r"has no summary\.json: the run is still running"):
        write_report(directory)


def test_the_experiment_is_told_in_a_few_lines(make_run, private_client):
    sizes = (100, 2000)
    spends = [private_client(number, size, 2.0, 5) for number, size in enumerate(sizes)]
    text = Page(report_of(make_run(clients=spends, rounds=5))).text
    for line in (
        "Data digits; 2,100 training examples; 359 public test examples; inputs of 1 × 8 × 8;",
        "Partition dirichlet, num_clients 2, alpha 0.5, min_examples 20, 100 to 2,000 examples",
        "Model mlp (hidden [32]); 2,410 parameters; loss cross_entropy",
        "Federation 40 rounds of all 2 clients, fedavg, weights uniform",
        "Local training 5 steps of 28 examples, sgd, lr 1",
        "Privacy trust local, unit example, noise multiplier ",
    ):
        assert line in text


def test_other_ways_to_train_are_in_the_experiments_lines(make_run):
    directory = make_run()
    more = "task: {name: pate}\nprivacy: {noise_correlation: {name: blt, buffers: 2}}\n"
    text = (directory.path / "experiment.yaml").read_text() + "  gradient: {name: zeroth_order}\n"
    directory.write_text("experiment.yaml", text + more)
    text = Page(report_of(directory)).text
    for words in ("Task pate", "gradient zeroth_order", "noise_correlation blt"):
        assert words in text


def test_private_sizes_of_clients_are_not_added_up(make_run):
    directory = make_run()
    privacy = directory.read_json("privacy.json")
    directory.write_json("privacy.json", {**privacy, "adjacency": "add_remove"})
    assert "training examples;" not in Page(report_of(directory)).text


def test_an_unreadable_experiment_leaves_its_lines_out(make_run):
    directory = make_run()
    directory.write_text("experiment.yaml", "a: [")
    text = Page(report_of(directory)).text
    assert "Federation 40" not in text
    assert "359 public test examples" in text


def test_accuracy_is_drawn_against_what_it_cost(make_run, make_rounds):
    page = Page(report_of(make_run()))
    assert all(f"against {cost}" in page.text for cost in ("its cost", "ε", "time"))
    rows = make_rounds(5, [], private=False, task="classification")
    for row in rows:
        row["traffic"] = {"down": 1_000_000, "up": 2_500_000}
    page = Page(report_of(make_run(private=False, rounds=rows)))
    assert "against communication" in page.text
    assert "MB sent and received" in page.text
    assert "17.5 MB: " in report_of(make_run(private=False, rounds=rows))
    for row in rows:  # as where participation is secret
        row.update(seconds=0, traffic=None)
    assert "its cost" not in Page(report_of(make_run(private=False, rounds=rows))).text


def test_noise_is_drawn_up_to_where_it_is_all_there_is(make_run, make_rounds):
    rows = make_rounds(3, [{"client": 0, "epsilon": 2.0}], private=True, task="classification")
    for row, length in zip(rows, (5.0, 3.2, 2.9), strict=True):
        row.update(update_norm=length, noise_norm=3.0)
    html = report_of(make_run(rounds=rows))
    for text in ("round 1: 0.562", "round 2: 7.26", "round 3: 34.7", "noise alone"):
        assert text in html  # the last is the largest with 2,410 values: (2410 / 2) ** 0.5
    for row in rows:
        row.update(noise_norm=None)  # as with momentum
    assert "Noise-to-signal" not in report_of(make_run(rounds=rows))


def columns_of(page: Page) -> dict[str, list[Any]]:
    """Return the table of clients as the script of the page reads it, by number of the client."""
    data = json.loads(page.scripts[0])
    rows = []
    for cells, steps in zip(data["kinds"], data["members"], strict=True):
        for client in accumulate(steps):
            name = [data["names"][str(client)]] if "name" in data["keys"] else []
            rows.append([client, *name, *cells])
    return dict(zip(data["keys"], map(list, zip(*sorted(rows), strict=True)), strict=True))


def test_the_same_epsilon_of_all_is_said_and_not_drawn(make_run, private_client):
    near = [private_client(number, 100, 7.99999 + number * 1e-8, 5) for number in range(3)]
    page = Page(report_of(make_run(clients=near, rounds=5)))
    assert "All 3 clients spent the same ε = 8." in page.text
    assert "The largest ε is that of all 3 clients" in page.text
    assert columns_of(page)["notes"] == ["–", "–", "–"]
    near[1] = private_client(1, 100, 7.95, 5)
    page = Page(report_of(make_run(clients=near, rounds=5)))
    assert "All 3 clients spent nearly the same ε, from 7.95 to 8." in page.text
    near[1] = private_client(1, 100, 7.0, 5)
    page = Page(report_of(make_run(clients=near, rounds=5)))
    assert "clients spent" not in page.text
    assert columns_of(page)["notes"] == ["largest ε", "–", "largest ε"]


@pytest.mark.parametrize(
    ("unit", "delta", "is_large"),
    [("example", 0.02, True), ("client", 0.02, False), ("client", 0.5, True)],
)
def test_a_delta_that_publishes_a_unit_is_noted(
    unit: str, delta: float, is_large: bool, make_run, private_client
) -> None:
    """One of 100 examples of a client, or one of three clients."""
    spends = [{**private_client(n, 100, 7.0, 5), "delta": delta} for n in range(3)]
    directory = make_run(clients=spends, rounds=5)
    privacy = directory.read_json("privacy.json")
    directory.write_json("privacy.json", {**privacy, "unit": unit})
    notes = columns_of(Page(report_of(directory)))["notes"]
    assert notes == ["δ too large" if is_large else "–"] * 3


def test_clients_have_a_table_without_privacy(make_run, make_rounds):
    rows = make_rounds(4, [{"client": 0, "epsilon": 0}], private=False, task="classification")
    columns = columns_of(Page(report_of(make_run(clients=2, private=False, rounds=rows))))
    assert columns["rounds"] == [4, 0]
    assert columns["notes"] == ["–", "never trained"]
    assert "epsilon" not in columns


def private_figures(count: int, classes: int = 4) -> dict[str, Any]:
    rows = [
        {
            "client": client,
            "labels": [(client % classes == label and 10) or 0 for label in range(classes)],
            "held_out": [2 if client % classes == label else 0 for label in range(classes)],
            "correct": [1 if client % classes == label else 0 for label in range(classes)],
        }
        for client in range(count)
    ]
    return {"schema": 1, "classes": [f"<{name}>" for name in range(classes)], "clients": rows}


@pytest.mark.parametrize("count", [8, 60])
def test_private_figures_are_marked_as_such(make_run, count):
    directory = make_run(clients=count, private=False)
    directory.write_json("client_data.json", private_figures(count))
    html = report_of(directory)
    page = Page(html)
    assert "Private data. Figures of the clients' own examples, for the experimenter's" in page.text
    assert "Label skew 75%" in page.text
    assert "client 5, 10 examples: &lt;1&gt;: 10" in html
    assert "client 5: 1 of 2 right; &lt;1&gt;: 1 of 2" in html
    assert set(columns_of(page)["score"]) == {"50.0%"}
    assert ("60 clients, by their most frequent class" in html) == (count == 60)


def test_a_private_run_shows_no_private_figures_whatever_its_directory_holds(make_run):
    directory = make_run()
    directory.write_json("client_data.json", private_figures(10))
    text = Page(report_of(directory)).text
    assert "Private data" not in text
    assert "Label skew" not in text
