"""What the terminal says: whole figures in 80 columns, and no more than the statement claims."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedsim.experiment import load_experiment
from fedsim.federation.assembly import assemble
from fedsim.planning.projection import plan_experiment
from fedsim.report.plan_terminal import print_plan
from fedsim.report.progress import ProgressCallback
from fedsim.report.terminal import print_result, print_sentence, wrap_text


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


def printed(directory) -> str:
    console = terminal()
    print_result(directory, console)
    return shown(console)


EXPERIMENT = {
    "name": "tiny",
    "data": {
        "dataset": "digits",
        "partition": {"scheme": "dirichlet", "num_clients": 3, "min_examples": 20},
    },
    "model": {"name": "logistic"},
    "federation": {"rounds": 2000},
    "local": {"steps": 5, "batch_size": 28},
    "privacy": {
        "target_epsilon": 7.125,
        "noise_multiplier": 12.345678,
        "delta": 1e-5,
        "max_grad_norm": 0.5,
        "on_exhausted": "withdraw",
    },
}


def test_a_table_with_every_column_fits_into_eighty_characters(make_run, private_client):
    spends = [private_client(n, 12345, 7.125 + n / 1000, 2000, target=7.875) for n in range(3)]
    spends[1].update(withdrawn_round=1999, delta=1.25e-05, noise_multiplier=123.456789)
    text = printed(make_run(clients=spends, rounds=3))
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["1"])
    assert row.split() == (
        "1 12345 123.5 2000 10000 1.25e-05 7.126 7.768 7.875 1999".split()  # noqa: SIM905
    )
    lines = [line for line in text.splitlines() if not line.startswith("report: ")]
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_the_plan_fits_into_eighty_characters():
    console = terminal()
    # Few batches of clients of one size are planned sooner than many.
    changes = {"local.batch_size": 280, "data.partition.scheme": "iid"}
    print_plan(plan_experiment(load_experiment(EXPERIMENT, changes)), console)
    lines = shown(console).splitlines()
    assert "…" not in "".join(lines)
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any(line.split()[-3:] == ["budget", "affords", "until"] for line in lines)


def test_an_epsilon_is_stated_where_it_holds(make_run):
    directory = make_run()
    largest = max(c["epsilon"] for c in directory.read_json("privacy.json")["clients"])
    assert f"every client within ε = {largest:g} at δ = 0.001" in printed(directory)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling": "shuffle"}, "batches were drawn by shuffle"),
        ({"noise": None}, "the source of its noise is not recorded"),
        ({"adjacency": "remove_some"}, "adjacency 'remove_some' is not known"),
    ],
)
def test_no_epsilon_is_stated_where_the_statement_withholds_it(make_run, change, reason):
    directory = make_run()
    directory.write_json("privacy.json", {**directory.read_json("privacy.json"), **change})
    text = printed(directory)
    assert "every client within" not in text
    assert "no guarantee:" in text
    assert reason in " ".join(text.split())


def test_an_infinite_epsilon_names_its_clients(make_run, private_client):
    spends = [private_client(0, 100, 2.0, 5), private_client(1, 100, None, 5)]
    text = printed(make_run(clients=spends, rounds=5))
    assert "every client within" not in text
    assert "no guarantee for the federation: ε = ∞ for client 1" in text


def test_a_name_is_shown_as_text_that_no_terminal_obeys(make_run, private_client):
    spends = [{**private_client(0, 100, 2.0, 5), "name": "[/x] [b]A \x1b[2J\nε = 0"}]
    assert "0 [/x] [b]A ?[2J?ε = 0 " in printed(make_run(clients=spends, rounds=5))
    console = terminal()
    print_sentence(console, "recall of \x1b[2J: 0%")
    assert shown(console) == "recall of ?[2J: 0%\n"


def test_a_failed_run_says_why(make_run):
    text = printed(make_run(rounds=3, status="failed"))
    assert "failed after 3 rounds" in text
    assert "every client failed" in text


def test_a_plan_shows_no_private_number_of_examples():
    console, bound = terminal(), {"max_grad_norm": None, "max_update_norm": 0.5}
    privacy = {**EXPERIMENT["privacy"], "unit": "client", **bound}
    print_plan(plan_experiment(load_experiment({**EXPERIMENT, "privacy": privacy})), console)
    assert "client  q" in shown(console)


def headline(**privacy: object) -> str:
    console = terminal()
    experiment = {**EXPERIMENT, "privacy": {**EXPERIMENT["privacy"], **privacy}}
    federation = assemble(load_experiment(experiment), ledger=None)
    observer = ProgressCallback(console)
    observer.started(federation, Path("run"))
    observer.ended()
    sizes = {str(len(examples)) for examples in federation.data.clients}
    assert len(sizes) > 1
    found = {size for size in sizes if f" {size} " in shown(console)}
    assert found in ({min(sizes, key=int), max(sizes, key=int)}, set())
    return "sizes are shown" if found else shown(console)


def test_private_client_sizes_are_not_announced():
    assert headline() == "sizes are shown"
    assert "3 clients with 77 declared examples each" in headline(
        adjacency={"name": "add_remove", "declared_examples": 77}
    )


words = st.text("abc δε=0123456789.%±≤ ", max_size=120)


@given(words, st.integers(20, 60))
def test_lines_keep_every_word_and_fit(text: str, width: int) -> None:
    lines = wrap_text(text, width, indent="  ").splitlines()
    assert " ".join(lines).split() == text.split()
    for line in lines:
        assert len(line) <= width or " " not in line.strip() or "=" in line or "≤" in line


@given(st.integers(12, 40))
def test_a_figure_stays_with_its_name(width: int) -> None:
    text = "client 7 is within ε = 8 at δ = 0.001 after 22 steps, test accuracy 90.8 % ± 1.2"
    lines = wrap_text(text, width).splitlines()
    for whole in ("client 7", "ε = 8", "δ = 0.001", "22 steps", "90.8 %", "± 1.2"):
        assert any(whole in line for line in lines), (width, whole)
