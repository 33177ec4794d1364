"""A charged search keeps its number of runs, its charges and its silence, whatever is attacked.

Runs are written by a stand-in that takes no time; `tests/tools/test_search.py` has real ones.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedsim.accountant import Gaussian, PldAccountant, PrivacyLedger, RdpAccountant, RepeatAndSelect
from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.accountant.sampler_slack import epsilon_with_slack
from fedsim.core.durable import GENESIS, chained_line
from fedsim.runs.directory import RunDirectory, RunDirectoryError
from fedsim.runs.files import SchemaError
from fedsim.runs.manifest import write_manifest
from fedsim.tools.search import ledger, perform
from fedsim.tools.search.ledger import (
    PATH,
    RECORDS,
    ClientCharge,
    Record,
    Search,
    SearchLedger,
    SearchLedgerError,
    SearchPlan,
)
from fedsim.tools.search.outputs import figure_of
from fedsim.tools.search.perform import SearchResult, SearchWithdrawnError, search
from fedsim.tools.search.plan import SearchError, common_charges
from fedsim.tools.search.verify import verify_search

EVENT, DELTA, MEAN = Gaussian(4.0), 1e-5, 3.0
DATA = "0" * 16 + ":" + "2" * 64
FILE = """\
base: base.yaml
variants:
  a: {}
  b: {local.optimizer.lr: 1.0}
  c: {local.optimizer.lr: 2.0}
select: {metric: test_accuracy, on: public_test, search: {mean: 3}}
"""
BASE = """\
name: tiny
data: {dataset: digits, partition: {scheme: iid, num_clients: 3}}
model: {name: logistic}
federation: {rounds: 2}
local: {steps: 1, batch_size: 32, optimizer: {name: sgd, lr: 0.5}}
privacy: {target_epsilon: 8.0, delta: 1e-4, max_grad_norm: 0.5, noise: secure}
"""


class Killed(BaseException):
    """The process was killed."""


Scores = Callable[[int, str], float]


class Runs:
    """A stand-in for `workers.execute` that writes the run directories at once."""

    def __init__(self, score: Scores, *, spends: int = 1, data: str = DATA) -> None:
        self._score, self._spends, self._data = score, spends, data
        self.jobs = 0

    def __call__(
        self, jobs: Sequence[Mapping[str, Any]], *, on_message: Any, log: Path, **_: Any
    ) -> None:
        log.write_text("what a plug-in printed\n")
        for index, job in enumerate(jobs):
            self.jobs += 1
            path = Path(job["directory"])
            self._write(path, job["record"]["variant"], int(path.name.removeprefix("run-")))
            on_message(index, {"event": "finished", "status": "completed"})

    def _write(self, path: Path, variant: str, run: int) -> None:
        directory, score = RunDirectory(path), self._score(run, variant)
        directory.create(
            experiment=f"name: {variant}\n", environment={}, inputs={"data": self._data}
        )
        directory.unlock()
        directory.write_text("model.safetensors", f"{variant} {score}")
        directory.write_json("summary.json", {"test_accuracy": score})
        ledger = PrivacyLedger().record(EVENT, self._spends)
        FileJournal(directory.ledger).append(Charge(0, 1, "0" * 64, 1, ledger, GENESIS))
        write_manifest(directory)


def best_is_first(run: int, variant: str) -> float:
    return 1.0 - run / 8


def plan(digest: str = "1" * 64, data: str = DATA, shape: float | None = 1.0) -> SearchPlan:
    ledger = PrivacyLedger().record(EVENT)
    charge = ClientCharge(client=0, delta=DELTA, ledger=ledger)
    return SearchPlan(
        digest=digest,
        data=data,
        candidates=["a", "b", "c"],
        metric="test_accuracy",
        mean=MEAN,
        shape=shape,
        adjacency="zero_out",
        draws=100,
        clients=[charge],
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comparison file with a search, and no need for data."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "compare.yaml").write_text(FILE)
    monkeypatch.setattr(perform, "plan_search", lambda *_: plan())
    load = cache(partial(perform.load_comparison, search=True))
    monkeypatch.setattr(perform, "load_comparison", lambda source, search: load(source))
    return tmp_path / "compare.yaml"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """Lets the operating system draw these configurations."""

    def draw(configurations: list[int]) -> None:
        monkeypatch.setattr(ledger.RunCountDistribution, "draw", lambda self: len(configurations))
        left = iter(configurations)
        monkeypatch.setattr(perform.secrets, "randbelow", lambda number: next(left))

    return draw


def perform_search(file: Path, runs: Runs | None = None, *, workers: int = 2) -> SearchResult:
    runs = runs or Runs(best_is_first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perform, "execute", runs)
        return search(file, out=file.parent / "out", workers=workers)


def last(out: Path) -> Search:
    return SearchLedger(out).searches[-1]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def interrupted_at(monkeypatch: pytest.MonkeyPatch, stage: int) -> Callable[[], int]:
    """Kill the process before its operation number `stage`; return how many there were."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == stage:
                raise Killed
            return function(*arguments, **options)

        return call

    for owner, name in (
        (SearchLedger, "append"),
        (Runs, "_write"),
        (perform, "write_selected"),
        (perform, "destroy_runs"),
        (perform, "write_account"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return lambda: count


def test_a_search_killed_at_any_stage_keeps_its_number_and_its_charges(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = file.parent / "out"
    drawn([1, 0])
    with monkeypatch.context() as patch:
        stages = interrupted_at(patch, 0)
        perform_search(file)
    shutil.rmtree(out)
    assert stages() > 12
    for stage in range(1, stages() + 1):
        drawn([1, 0])
        with monkeypatch.context() as patch:
            interrupted_at(patch, stage)
            with pytest.raises(Killed):
                perform_search(file)
        drawn([0] * 3)  # what a second draw would give
        before = (out / PATH).read_bytes() if (out / PATH).exists() else b""
        charged = last(out).charged_runs if before else 0
        cut = [run for run in last(out).pending if run in last(out).attempts] if before else []
        perform_search(file)
        found = last(out)
        assert (out / PATH).read_bytes().startswith(before)
        expected = [1, 0] if before else [0] * 3
        assert found.drawn.configurations == expected, stage
        assert sorted(found.done) == list(range(len(expected)))
        assert found.charged_runs == len(expected) + len(cut)
        assert found.charged_runs >= charged
        assert verify_search(out).problems == ()
        assert not (out / "account" / "work").exists()
        shutil.rmtree(out)


def test_both_charges_are_on_disk_before_the_first_run(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0, 1, 2, 0])
    out = file.parent / "out"
    seen: list[Search] = []

    class Watching(Runs):
        def _write(self, path: Path, variant: str, run: int) -> None:
            seen.append(last(out))
            super()._write(path, variant, run)

    perform_search(file, Watching(best_is_first))
    figure = figure_of(seen[:1], sees_runs=True)
    four = PldAccountant().compose(EVENT, 4)
    assert seen[0].drawn.runs == 4
    assert figure.epsilon == epsilon_with_slack(four.get_epsilon, DELTA)
    assert (seen[0].drawn.mean, seen[0].drawn.shape) == (MEAN, 1.0)
    assert [len(one.done) for one in seen] == [0, 1, 2, 3]


def test_both_figures_are_those_of_the_accountants(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0, 1])
    account = perform_search(file).account
    every = PldAccountant().compose(EVENT, 2)
    alone = RdpAccountant().compose(RepeatAndSelect(EVENT, MEAN, 1.0))
    assert account["every_run"]["epsilon"] == epsilon_with_slack(every.get_epsilon, DELTA)
    assert account["selection"]["epsilon"] == epsilon_with_slack(alone.get_epsilon, DELTA)
    assert account["every_run"]["observer"] != account["selection"]["observer"]


def test_a_repeated_attempt_is_charged_and_changes_no_claim(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(Runs, "_write", raises_killed)
        with pytest.raises(Killed):
            perform_search(file)
    account = perform_search(file).account
    whole = PldAccountant().compose(EVENT, 4)
    alone = RdpAccountant().compose(RepeatAndSelect(EVENT, MEAN, 1.0))
    assert account["every_run"]["epsilon"] == epsilon_with_slack(whole.get_epsilon, DELTA)
    assert account["selection"]["epsilon"] == epsilon_with_slack(alone.get_epsilon, DELTA)


@pytest.mark.parametrize(
    ("configurations", "scores"),
    [
        ([1], [0.9]),
        ([0, 1, 2], [0.1, 0.9, 0.2]),
        ([2, 2, 0, 0, 2, 1], [0.3, 0.5, 0.8, 0.7, 0.2, 0.9]),
        ([1, 1, 1, 1], [0.9, 0.1, 0.2, 0.9]),
    ],
)
def test_public_files_tell_nothing_of_other_runs(
    file: Path,
    drawn: Callable[[list[int]], None],
    configurations: list[int],
    scores: list[float],
) -> None:
    out = file.parent / "out"
    drawn([1])
    perform_search(file, Runs(lambda run, variant: 0.9))
    expected, marker = files_of(out / "selected"), (out / "search.yaml").read_bytes()
    shutil.rmtree(out)
    drawn(configurations)
    perform_search(file, Runs(lambda run, variant: scores[run]), workers=3)
    assert files_of(out / "selected") == expected
    assert (out / "search.yaml").read_bytes() == marker
    assert set(expected) == {
        f"search-1/{name}" for name in ("model.safetensors", "experiment.yaml", "selection.json")
    }


def test_no_file_is_left_but_the_declared_ones(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([1, 0, 2, 2])
    perform_search(file, Runs(lambda run, variant: [0.123456, 0.9, 0.234567, 0.345678][run]))
    found = files_of(file.parent / "out")
    assert set(found) == {
        ".lock",
        "search.yaml",
        "account/search.jsonl",
        "account/comparison.json",
        "account/comparison.html",
        "selected/search-1/model.safetensors",
        "selected/search-1/experiment.yaml",
        "selected/search-1/selection.json",
    }
    for name, content in found.items():
        for lost in (b"0.123456", b"0.234567", b"0.345678", b"what a plug-in printed"):
            assert lost not in content, name


def test_no_run_drawn_selects_nothing(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "plan_search", lambda *_: plan(shape=None))
    drawn([])
    result = perform_search(file)
    assert result.variant is None
    assert set(files_of(result.selected)) == {"selection.json"}
    assert result.account["every_run"]["epsilon"] == 0.0
    assert result.account["selection"]["epsilon"] > 0.0
    assert verify_search(result.path).problems == ()


class Failing(Runs):
    """Runs of which the second fails."""

    def __call__(self, jobs: Any, *, on_message: Any, log: Path, **_: Any) -> None:
        def tell(index: int, message: Mapping[str, Any]) -> None:
            failed = self.jobs == 2
            on_message(index, {"event": "failed", "reason": "NaN"} if failed else message)

        super().__call__(jobs, on_message=tell, log=log)


def test_a_failed_run_withdraws_the_claim_and_charges_all(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0, 1, 2])
    out, runs = file.parent / "out", Failing(best_is_first)
    with pytest.raises(SearchWithdrawnError, match=r"ended without a model \(a run failed: NaN"):
        perform_search(file, runs)
    figure = figure_of(SearchLedger(out).searches, sees_runs=False)
    alone = RdpAccountant().compose(EVENT, 3)
    assert figure.epsilon == epsilon_with_slack(alone.get_epsilon, DELTA)
    assert not (out / "selected").exists()
    assert not (out / "account" / "work").exists()
    assert verify_search(out).problems == ()
    again = Runs(best_is_first)
    with pytest.raises(SearchWithdrawnError, match="no selection is claimed"):
        perform_search(file, again)
    assert again.jobs == 0


def test_a_run_that_spends_more_than_its_charge_withdraws_the_claim(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0])
    with pytest.raises(SearchWithdrawnError, match="spent something else than its charge"):
        perform_search(file, Runs(best_is_first, spends=2))


def test_runs_on_other_data_than_the_search_began_with_withdraw_the_claim(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    """The theorem of a selection is for runs on one data set."""
    drawn([0])
    with pytest.raises(SearchWithdrawnError, match="the data changed since the runs were drawn"):
        perform_search(file, Runs(best_is_first, data=DATA.replace("2", "3")))


@pytest.mark.parametrize("change", ["score", "removed"])
def test_a_finished_run_that_was_changed_withdraws_the_claim(
    file: Path,
    drawn: Callable[[list[int]], None],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    drawn([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(perform, "write_selected", raises_killed)
        with pytest.raises(Killed):
            perform_search(file)
    run = file.parent / "out/account/work/search-1/run-1"
    if change == "removed":
        shutil.rmtree(run)
    else:
        (run / "summary.json").write_text('{"test_accuracy": 2.0}')
    with pytest.raises(SearchWithdrawnError, match="a run that had ended was changed or removed"):
        perform_search(file)


def raises_killed(*_: object, **__: object) -> None:
    raise Killed


def test_the_best_score_is_selected_and_one_that_is_not_finite_is_worst(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0, 2, 1])
    scores: list[Any] = [None, 0.1, 0.2]
    result = perform_search(file, Runs(lambda run, variant: scores[run]))
    assert result.variant == "b"


def test_a_new_search_adds_up_and_a_finished_one_is_not_repeated(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn([0, 1])
    perform_search(file)
    again = Runs(best_is_first)
    perform_search(file, again)
    assert again.jobs == 0
    monkeypatch.setattr(perform, "plan_search", lambda *_: plan(digest="3" * 64))
    drawn([2, 2, 2])
    account = perform_search(file, again).account
    assert again.jobs == 3
    every = PldAccountant().compose(EVENT, 5)
    alone = RdpAccountant().compose(RepeatAndSelect(EVENT, MEAN, 1.0), 2)
    assert account["every_run"]["epsilon"] == epsilon_with_slack(every.get_epsilon, DELTA)
    assert account["selection"]["epsilon"] == epsilon_with_slack(alone.get_epsilon, DELTA)
    assert {path.name for path in (file.parent / "out/selected").iterdir()} == {
        "search-1",
        "search-2",
    }
    assert verify_search(file.parent / "out").problems == ()


def test_an_unfinished_search_is_not_given_up_by_a_change_of_the_file(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(Runs, "_write", raises_killed)
        with pytest.raises(Killed):
            perform_search(file)
    monkeypatch.setattr(perform, "plan_search", lambda *_: plan(digest="3" * 64))
    with pytest.raises(SearchError, match="search 1, which has not ended, and the file"):
        perform_search(file)
    assert "has not ended" in verify_search(file.parent / "out").problems[0]


def test_other_data_do_not_add_up(
    file: Path, drawn: Callable[[list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn([0])
    perform_search(file)
    monkeypatch.setattr(
        perform, "plan_search", lambda *_: plan(digest="3" * 64, data="0" * 16 + ":" + "4" * 64)
    )
    with pytest.raises(SearchError, match="searches of other data"):
        perform_search(file)


def test_a_removed_ledger_is_no_new_start(file: Path, drawn: Callable[[list[int]], None]) -> None:
    drawn([0])
    perform_search(file)
    shutil.rmtree(file.parent / "out" / "account")
    with pytest.raises(RunDirectoryError, match=r"selected models and no account/search\.jsonl"):
        perform_search(file)
    assert "its ledger was removed" in verify_search(file.parent / "out").problems[0]


def chained(records: Sequence[Record]) -> list[str]:
    """Return the lines of a forger who computes every hash anew."""
    lines, head = [], GENESIS
    for record in records:
        line, head = chained_line(record.model_dump(mode="json", by_alias=True), head)
        lines.append(line)
    return lines


def forgeries(lines: list[str]) -> Iterator[tuple[list[str], str]]:
    """Yield changed ledgers of two runs, and what is wrong with each."""
    changed, continued = "was changed after it was written", "does not continue the chain"
    yield [lines[0].replace('"mean":3.0', '"mean":2.0'), *lines[1:]], changed
    yield [*lines[:-1], lines[-1].replace('"variant":"a"', '"variant":"c"')], changed
    yield lines[1:], continued
    yield [lines[0], *lines[2:]], continued
    records = [RECORDS.validate_python(without_hashes(line)) for line in lines]
    other = records[0].model_copy(update={"mean": 2.0})
    yield [*chained([other]), *lines[1:]], continued
    fewer = records[0].model_copy(update={"configurations": [0]})
    one_run = [records[1], records[3]]
    yield chained([records[0], *one_run, records[-1]]), "1 drawn runs have not ended"
    yield chained([fewer, *records[1:]]), "attempt 1 of run 1 cannot begin"
    yield chained([*records[:2], *records[1:]]), "attempt 1 of run 0 cannot begin"
    yield chained([records[0], records[3], *records[1:3], *records[4:]]), "run 0 cannot end"
    yield chained([*records, records[1]]), "its search has ended"
    yield chained([records[0], records[0]]), "search 1 has not ended"


def without_hashes(line: str) -> dict[str, Any]:
    content = json.loads(line)
    return {key: value for key, value in content.items() if key not in ("hash", "previous")}


def test_a_changed_ledger_is_refused(file: Path, drawn: Callable[[list[int]], None]) -> None:
    drawn([0, 1])
    out = perform_search(file).path
    lines = (out / PATH).read_text().splitlines(keepends=True)
    assert [without_hashes(line)["record"] for line in lines] == [
        *("drawn", "begun", "begun", "done", "done", "selected")
    ]
    for forged, what in forgeries(lines):
        (out / PATH).write_text("".join(forged))
        with pytest.raises(SearchLedgerError, match=what):
            SearchLedger(out)
        assert what in verify_search(out).problems[0]


def test_verify_finds_every_changed_file(file: Path, drawn: Callable[[list[int]], None]) -> None:
    drawn([0, 1])
    out = perform_search(file).path
    root = verify_search(out).root
    assert verify_search(out, root=root).problems == ()
    assert "the last record is" in verify_search(out, root="0" * 64).problems[0]
    for name, content in files_of(out).items():
        if name in (".lock", "search.yaml", PATH):
            continue
        (out / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert verify_search(out).problems, name
        (out / name).write_bytes(content)
    for name in ("selected/search-2/run", "account/work/run", "log"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("left")
        assert verify_search(out).problems, name
        (out / name).unlink()
        if name != "log":
            (out / name).parent.rmdir()
    assert verify_search(out).problems == ()


def test_verify_recomputes_both_figures(file: Path, drawn: Callable[[list[int]], None]) -> None:
    drawn([0, 1])
    out = perform_search(file).path
    path = out / "account" / "comparison.json"
    for key in ("every_run", "selection"):
        content = json.loads(path.read_text())
        smaller = {**content[key], "epsilon": content[key]["epsilon"] * 0.9}
        path.write_text(json.dumps({**content, key: smaller}))
        assert f"account/comparison.json: {key} differs from the ledger" in (
            verify_search(out).problems
        )
        path.write_text(json.dumps(content))


def test_the_words_are_compared_whatever_version_the_account_names(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0])
    out = perform_search(file).path
    path = out / "account" / "comparison.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "fedsim": "9.9.9", "statement": ["No one saw it."]}))
    assert [one.rpartition(": ")[2] for one in verify_search(out).problems] == [
        "fedsim differs from the ledger",
        "statement differs from the ledger",
    ]


def test_a_ledger_of_another_schema_is_refused(
    file: Path, drawn: Callable[[list[int]], None]
) -> None:
    drawn([0])
    out = perform_search(file).path
    first, *_ = (out / PATH).read_text().splitlines()
    line, _ = chained_line({**without_hashes(first), "schema": 2}, GENESIS)
    (out / PATH).write_text(line)
    with pytest.raises(SchemaError, match=r"search\.jsonl of fedsim .* has schema 2, and .* reads"):
        verify_search(out)


def candidate(name: str, ledger: PrivacyLedger, *, delta: float = DELTA) -> SearchPlan:
    charge = ClientCharge(client=0, delta=delta, ledger=ledger)
    return plan().model_copy(update={"candidates": [name], "clients": [charge]})


@pytest.mark.parametrize(
    "other",
    [
        PrivacyLedger().record(Gaussian(4.1), 10),
        PrivacyLedger().record(Gaussian(4.0), 11),
        PrivacyLedger().record(Gaussian(4.0), 10).record(Gaussian(9.0)),
        PrivacyLedger(),
    ],
    ids=["noise", "steps", "more", "nothing"],
)
def test_a_candidate_with_another_event_is_refused(other: PrivacyLedger) -> None:
    first = candidate("a", PrivacyLedger().record(Gaussian(4.0), 10))
    with pytest.raises(SearchError, match="candidates 'a' and 'b' have other events: client 0"):
        common_charges([first, candidate("b", other)])


def test_a_candidate_with_another_delta_is_refused() -> None:
    ledger = PrivacyLedger().record(Gaussian(4.0), 10)
    with pytest.raises(SearchError, match="another adjacency or δ"):
        common_charges([candidate("a", ledger), candidate("b", ledger, delta=1e-4)])


def test_of_noise_that_the_grid_makes_unequal_the_least_is_charged() -> None:
    first = candidate("a", PrivacyLedger().record(Gaussian(4.0), 10))
    second = candidate("b", PrivacyLedger().record(Gaussian(3.9999), 10))
    for order in ([first, second], [second, first]):
        assert common_charges(order)[0].ledger.entries == ((Gaussian(3.9999), 10),)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize(
    "every", [pytest.param(9, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_a_search_killed_at_any_write_keeps_its_number_and_its_charges(
    file: Path,
    drawn: Callable[[list[int]], None],
    beside: Callable[[str], ModuleType],
    every: int,
) -> None:
    kills = beside("kills")
    out, said = file.parent / "out", file.parent / "said"

    def child(at: int) -> int:
        """Perform the search in a forked process that kills itself at an operation."""
        pid = os.fork()
        if pid == 0:
            disk = kills.Disk(out / "x", at=at, act=kills.kill if at else None, lasting=False)
            disk.install()
            code = 1
            try:
                perform_search(file)
                code = 0
            finally:
                with open(said, "w") as stream:  # not the counted Path.open
                    stream.write(str(disk.count))
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    for at in range(1, 10_000, every):
        shutil.rmtree(out, ignore_errors=True)
        drawn([1, 0, 2])
        killed = child(at)
        before = (out / PATH).read_bytes() if (out / PATH).exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        charged = last(out).charged_runs if whole else 0
        drawn([0] * 7)  # what a second draw would give
        assert child(0) == 0
        after = last(out)
        assert after.drawn.configurations == ([1, 0, 2] if whole else [0] * 7), at
        assert (out / PATH).read_bytes().startswith(whole), at
        assert after.charged_runs >= charged, at
        assert len(after.done) == after.drawn.runs, at
        assert verify_search(out).problems == (), at
        if killed == 0:  # there were fewer operations
            assert at > 50
            break
    else:
        pytest.fail("every number of operations was killed")
