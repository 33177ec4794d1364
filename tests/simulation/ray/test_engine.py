"""The Ray engine: real actors, real deaths."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

from fedsim.runs.runner import run_experiment
from fedsim.simulation.engine import EngineError
from fedsim.simulation.engines import LocalEngine
from fedsim.simulation.ray import engine as ray_engine
from fedsim.simulation.ray import pool
from fedsim.simulation.settings import RuntimeSettings

ray = pytest.importorskip("ray", reason="engine ray needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

Outcome = Callable[[Path], dict[str, Any]]
PATIENCE = 180.0  # seconds: beside other work, Ray takes more than a minute to start or to end


@pytest.fixture(scope="module")
def cluster(ray_of_the_process: Any) -> None:
    """The Ray of this process, with three processors."""
    ray_of_the_process.start(3)


def serve(main: Callable[[Grid], None], client: ClientApp, clients: int, workers: int) -> None:
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid)

    ray_engine.RayEngine(RuntimeSettings(engine="ray", workers=workers)).execute(
        app, client, clients
    )


def strange_client() -> ClientApp:
    """Does what the message says; made here so that it travels by value."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import os
        import signal
        import time
        from pathlib import Path

        config = message.content.config_records["config"]
        rounds = int(context.state.config_records.get("count", ConfigRecord({"n": 0}))["n"]) + 1  # pyright: ignore[reportArgumentType]
        context.state["count"] = ConfigRecord({"n": rounds})
        partition = int(context.node_config["partition-id"])
        time.sleep(float(config.get("pause", 0.0)))  # pyright: ignore[reportArgumentType]
        if config.get("hold") == partition:
            while not Path(str(config["gate"])).exists():
                time.sleep(0.01)
        if config.get("kill") == partition:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.get("raise") == partition:
            raise RuntimeError("power cut")
        if config.get("sleep") == partition:
            time.sleep(60)
        if config.get("wait") == partition:
            path = Path(str(config["file"]))
            path.write_text("working")
            while path.exists():
                time.sleep(0.01)
        value = message.content.array_records["arrays"]["w"].numpy() + partition + 1
        message.content["config"] = ConfigRecord({"scribble": partition})
        content = RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(value)}),
                "metrics": MetricRecord(
                    {"num-examples": partition + 1, "rounds": rounds, "pid": os.getpid()}
                ),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        value = float(message.content.array_records["arrays"]["w"].numpy()[0])
        metrics = MetricRecord({"num-examples": 1, "value": value})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def messages(grid: Grid, **config: int | float | str) -> list[Message]:
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros(2))}), "config": ConfigRecord(dict(config))}
    )
    return [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]


def partition(reply: Message) -> int:
    return reply.metadata.src_node_id - 1000


def by_client(replies: Iterator[Message]) -> dict[int, Message]:
    return {partition(reply): reply for reply in replies}


def metric(reply: Message, name: str) -> int:
    return int(reply.content.metric_records["metrics"][name])  # pyright: ignore[reportArgumentType]


def test_flowers_fedavg_runs_unchanged() -> None:
    results: list[Result] = []

    def main(grid: Grid) -> None:
        start = ArrayRecord({"w": Array(np.zeros(2))})
        results.append(FedAvg(min_available_nodes=3).start(grid, start, num_rounds=3))

    serve(main, strange_client(), 3, workers=2)
    np.testing.assert_allclose(results[0].arrays["w"].numpy(), 3 * (1 + 4 + 9) / 6)
    assert results[0].train_metrics_clientapp[3]["rounds"] == 3, "state lives on over rounds"
    assert results[0].evaluate_metrics_clientapp[3]["value"] == pytest.approx(3 * 14 / 6)


def test_clients_stay_where_they_are_and_the_model_travels_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    puts: list[object] = []
    put = ray.put

    def counted(value: object) -> object:
        puts.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    locally = answers(locally_failed())

    def main(grid: Grid) -> None:
        first, second = (by_client(iter(grid.send_and_receive(messages(grid)))) for _ in range(2))
        assert sorted(first) == [0, 1, 2, 3]
        pids = [{c: metric(r, "pid") for c, r in replies.items()} for replies in (first, second)]
        assert pids[0] == pids[1]
        assert len(set(pids[0].values())) == 2
        assert all(metric(reply, "rounds") == 2 for reply in second.values())
        assert len(puts) == 2, "once a round, not once a client"
        ids = list(grid.push_messages(messages(grid)))
        replies = list(grid.pull_messages(ids))
        assert {reply.metadata.reply_to_message_id for reply in replies} == set(ids)
        assert list(grid.pull_messages(ids)) == []
        failed = by_client(iter(grid.send_and_receive(messages(grid, **{"raise": 1}))))
        assert failed[1].error.reason == "RuntimeError: power cut"
        assert answers(failed) == locally
        after = by_client(iter(grid.send_and_receive(messages(grid))))
        assert metric(after[1], "rounds") == 5, "what was written before the error is kept"

    serve(main, strange_client(), 4, workers=2)


def answers(replies: dict[int, Message]) -> dict[int, Any]:
    """Return what each client answered, or the reason why it did not."""
    return {
        client: reply.error.reason
        if reply.has_error()
        else reply.content.array_records["arrays"]["w"].numpy().tolist()
        for client, reply in sorted(replies.items())
    }


def locally_failed() -> dict[int, Message]:
    """Return the replies of the local engine where client 1 raises an exception."""
    replies: dict[int, Message] = {}
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        replies.update(by_client(iter(grid.send_and_receive(messages(grid, **{"raise": 1})))))

    LocalEngine().execute(app, strange_client(), 4)
    return replies


def test_a_worker_killed_in_mid_round_is_replaced_and_loses_nothing(tmp_path: Path) -> None:
    def main(grid: Grid) -> None:
        before = by_client(iter(grid.send_and_receive(messages(grid))))
        victim = metric(before[0], "pid")
        mates = {client for client, reply in before.items() if metric(reply, "pid") == victim}
        assert 0 in mates
        assert mates != set(before)
        busy = tmp_path / "busy"
        replies = iter(grid.send_and_receive(messages(grid, wait=0, file=str(busy))))
        other = next(replies)  # the other worker answers, client 0 waits
        while not busy.exists():
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        busy.unlink()
        (tmp_path / "busy").mkdir()  # on the second request the client raises instead of waiting
        rest = by_client(replies)
        assert {partition(other), *rest} == {0, 1, 2, 3}
        (tmp_path / "busy").rmdir()
        last = by_client(iter(grid.send_and_receive(messages(grid))))
        for client in (1, 2, 3):
            assert metric(last[client], "rounds") == 3, "no state was lost and none came twice"
        replaced = {metric(last[client], "pid") for client in mates}
        assert len(replaced) == 1
        assert victim not in replaced
        unharmed = set(before) - mates
        assert all(metric(last[c], "pid") == metric(before[c], "pid") for c in unharmed)

    serve(main, strange_client(), 4, workers=2)


class Clock:
    """The clock of the pool, which a test sets forward: none waits for a timeout to pass."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def set_forward(self) -> None:
        self._ahead = 10_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(pool, "time", found)
    return found


def test_after_the_timeout_the_others_replies_are_there(clock: Clock, logged: Any) -> None:
    def main(grid: Grid) -> None:
        list(grid.send_and_receive(messages(grid)))  # both workers are at work
        replies: list[int] = []
        for reply in grid.send_and_receive(messages(grid, sleep=0), timeout=1000):
            replies.append(partition(reply))
            clock.set_forward()
        assert replies == [1]

    serve(main, strange_client(), 2, workers=2)
    assert "no reply within 1000 s from clients [0]" in logged.text


def test_a_worker_that_goes_on_answering_does_not_put_off_the_timeout(
    clock: Clock, logged: Any
) -> None:
    """And the garbage collector leaves out what was there before the rounds.

    A full collection would visit all objects of torch and Flower in vain.
    """

    def main(grid: Grid) -> None:
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() != before
        list(grid.send_and_receive(messages(grid)))
        replies: list[int] = []
        for reply in grid.send_and_receive(messages(grid, pause=0.3), timeout=1000):
            replies.append(partition(reply))
            clock.set_forward()
        assert 1 <= len(replies) < 12

    before = gc.get_threshold()
    serve(main, strange_client(), 12, workers=1)
    assert "no reply within 1000 s from clients" in logged.text
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_workers_without_a_range_of_clients_stay_out(logged: Any) -> None:
    def main(grid: Grid) -> None:
        assert len(by_client(iter(grid.send_and_receive(messages(grid))))) == 1

    serve(main, strange_client(), 1, workers=2)
    assert "runtime.workers: 2 workers, but only 1 start" in logged.text
    assert "use workers: 1, or a smaller local.vectorized_clients" in logged.text


def test_too_many_workers_and_unstartable_clients_are_refused() -> None:
    with pytest.raises(EngineError, match=r"8 workers need a processor each, .* has 3"):
        serve(lambda grid: None, strange_client(), 8, workers=8)

    class Unreadable(ClientApp):
        def __reduce__(self) -> Any:
            return int, ("no number",)

    with pytest.raises(EngineError, match=r"worker 0 does not start: .*no number"):
        serve(lambda grid: None, Unreadable(), 1, workers=1)


@pytest.fixture
def large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call hold all requests of a worker, on a busy machine too, where answers are slow."""
    monkeypatch.setattr(pool, "_TARGET_CALL_SECONDS", 10_000.0)


def count_calls(grid: Grid, calls: list[int]) -> None:
    """Note the size of every call to the only worker."""
    workers = grid._pool._workers  # pyright: ignore[reportAttributeAccessIssue]
    (worker,) = workers
    take = worker._next_jobs

    def counted() -> Any:
        jobs = take()
        calls.append(len(jobs))
        return jobs

    worker._next_jobs = counted


@pytest.mark.usefixtures("large_groups")
def test_replies_come_while_their_call_goes_on_and_outlive_their_worker(tmp_path: Path) -> None:
    """Who answered before the death of the worker is not asked again; the others, one by one."""
    calls: list[int] = []

    def ask(grid: Grid, gate: Path, **config: int) -> dict[int, Message]:
        """Let the third client go on when the replies of the first two have arrived."""
        calls.clear()
        asked = messages(grid, pause=0.3, hold=2, gate=str(gate), **config)
        replies: list[Message] = []
        for reply in grid.send_and_receive(asked):
            replies.append(reply)
            if len(replies) == 2:
                gate.touch()
        assert [partition(reply) for reply in replies[:2]] == [0, 1]
        assert len(replies) == 4
        return by_client(iter(replies))

    def main(grid: Grid) -> None:
        list(grid.send_and_receive(messages(grid)))
        count_calls(grid, calls)
        assert not any(reply.has_error() for reply in ask(grid, tmp_path / "first").values())
        assert calls == [4], "one call for all clients"
        replies = ask(grid, tmp_path / "second", kill=2)
        assert [client for client, reply in replies.items() if reply.has_error()] == [2]
        assert "died 3 times while answering" in (replies[2].error.reason or "")
        assert calls[0] == 4
        assert set(calls[1:]) == {1}
        later = by_client(iter(grid.send_and_receive(messages(grid))))
        assert [metric(later[client], "rounds") for client in range(4)] == [4, 4, 3, 4]

    serve(main, strange_client(), 4, workers=1)


PLUGIN = """\
import os, signal
import numpy as np, torch
from torch import nn

def load(seed=0):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)

def build():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))

def loss(outputs, targets):
    try:
        os.unlink({armed!r})  # one process can
    except OSError:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def experiment(directory: Path, armed: Path, **sections: Any) -> dict[str, Any]:
    (directory / "plugin.py").write_text(PLUGIN.format(armed=str(armed)))
    return {
        "name": "ray",
        "data": {
            "dataset": "./plugin.py:load",
            "partition": {"scheme": "quantity", "num_clients": 9, "min_examples": 10},
        },
        "model": {"name": "./plugin.py:build", "loss": "./plugin.py:loss"},
        "federation": {"rounds": 3, "clients_per_round": 8},
        "local": {
            **{"steps": 2, "batch_size": 16, "vectorized_clients": 2},
            "optimizer": {"name": "sgd", "lr": 0.5},
        },
        "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
        **sections,
    }


class ArmAfterRound:
    """An observer that has a worker killed in the round after the given one."""

    def __init__(self, round_number: int, armed: Path) -> None:
        self._round, self._armed = round_number, armed

    def started(self, federation: Any, path: Path) -> None:
        self.max_clients = federation.blocks.plan.max_clients

    def round_finished(self, row: Any) -> None:
        if row["round"] == self._round:
            self._armed.touch()

    def ended(self) -> None: ...


def test_workers_give_the_local_result_also_when_one_is_killed(
    tmp_path: Path, outcome_of: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after the charge and before the reply, the worst moment.

    One and two workers without a kill: tests/runs/test_engines.py.
    """
    monkeypatch.chdir(tmp_path)
    armed = tmp_path / "armed"
    settings = experiment(tmp_path, armed)
    local = run_experiment(settings, out=tmp_path / "local")
    overrides = {"runtime.engine": "ray", "runtime.workers": 2}
    kill = ArmAfterRound(1, armed)
    run = run_experiment(settings, overrides=overrides, out=tmp_path / "ray", callback=kill)
    assert not armed.exists(), "the kill took place"
    assert kill.max_clients == 2, "clients train together"
    assert all(row["failed"] == [] for row in run.rounds)
    assert outcome_of(local.path) == outcome_of(tmp_path / "ray")


KILLED_AFTER_ROUND_1 = """
import os, signal
import fedsim.runs.runner

class Kill:
    def started(self, *_): ...
    def ended(self): ...
    def round_finished(self, row): os.kill(os.getpid(), signal.SIGKILL)

fedsim.runs.runner.run_experiment("e.yaml", out="r", callback=Kill())
"""


def test_a_run_killed_on_two_workers_ends_the_same_on_one(
    tmp_path: Path, outcome_of: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the run itself: blocks are planned, so the other workers form the same ones."""
    monkeypatch.chdir(tmp_path)
    settings = experiment(tmp_path, tmp_path / "never")
    whole = run_experiment(settings, out=tmp_path / "whole")
    two, one = ({"engine": "ray", "workers": number} for number in (2, 1))
    (tmp_path / "e.yaml").write_text(json.dumps({**settings, "runtime": two}))
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_ROUND_1], timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    assert len((tmp_path / "r" / "rounds.jsonl").read_text().splitlines()) == 1
    run_experiment({**settings, "runtime": one}, out=tmp_path / "r", resume=True)
    assert outcome_of(whole.path) == outcome_of(tmp_path / "r")


def descendants(of: int) -> dict[int, str]:
    """Return the command lines of all processes below one, by pid."""
    found: dict[int, str] = {}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            parents[int(entry.name)] = (int(stat.rsplit(")", 1)[1].split()[1]), line)
    wave = [of]
    while wave:
        wave = [pid for pid, (parent, _) in parents.items() if parent in wave]
        found |= {pid: parents[pid][1] for pid in wave}
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class KillKeeperAfterRound1:
    """An observer that kills the process that writes the ledger."""

    def started(self, federation: object, path: Path) -> None: ...

    def round_finished(self, row: Any) -> None:
        if row["round"] == 1:
            from ray._private.state import actors

            kind = {"ActorClassName": "JournalActor", "State": "ALIVE"}
            (actor,) = [one["Pid"] for one in actors().values() if kind.items() <= one.items()]
            os.kill(actor, signal.SIGKILL)

    def ended(self) -> None: ...


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_the_ledgers_keeper_may_die_too(
    tmp_path: Path, outcome_of: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = experiment(tmp_path, tmp_path / "never")
    local = run_experiment(settings, out=tmp_path / "local")
    overrides = {"runtime.engine": "ray", "runtime.workers": 2}
    observer = KillKeeperAfterRound1()
    run = run_experiment(settings, overrides=overrides, out=tmp_path / "ray", callback=observer)
    assert all(row["failed"] == [] for row in run.rounds)
    assert outcome_of(local.path) == outcome_of(run.path)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_killed_run_leaves_nothing_running(tmp_path: Path) -> None:
    """After kill -9 of the run itself; after Ctrl-C and SIGTERM: test_interrupts.py.

    Ray's agents (idle, no data) take up to a minute to notice.
    """
    settings = experiment(tmp_path, tmp_path / "never")
    settings["federation"]["rounds"] = 10_000
    settings["privacy"] = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}
    settings["runtime"] = {"engine": "ray", "workers": 1}
    (tmp_path / "e.yaml").write_text(json.dumps(settings))
    code = "import fedsim.runs.runner; fedsim.runs.runner.run_experiment('e.yaml', out='r')"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family: dict[int, str] = {}
    try:
        family = _family_at_work(process, tmp_path / "r" / "rounds.jsonl", log)
        process.kill()
        process.wait(timeout=PATIENCE)
        until = time.monotonic() + PATIENCE
        agents = {pid for pid, line in family.items() if "Agent" in line}
        while left := {pid: family[pid] for pid in set(family) - agents if alive(pid)}:
            assert time.monotonic() < until, f"{left}\n{log.read_text()}"
            time.sleep(0.1)
    finally:
        for pid in filter(alive, [process.pid, *family]):
            os.kill(pid, signal.SIGKILL)


def _family_at_work(process: subprocess.Popen[bytes], rounds: Path, log: Path) -> dict[int, str]:
    """Wait for two rounds, for which the worker answered; return all processes of the run."""
    until = time.monotonic() + PATIENCE
    while not (rounds.exists() and rounds.read_text().count("\n") >= 2):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    assert all(json.loads(row)["failed"] == [] for row in rounds.read_text().splitlines()[:2])
    family = descendants(process.pid)
    # The ledger's actor and the worker. Ray gives a worker its title if it can: not where it
    # overwrote the variable that happens to be the first of the worker's environment.
    hosts = [line for line in family.values() if "default_worker" in line or "ray::" in line]
    assert sum("Agent" not in line for line in hosts) >= 2, "\n".join(family.values())
    return family


def test_without_ray_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'fedsim-dp\[ray\]'.*engine: local"):
        serve(lambda grid: None, strange_client(), 2, workers=1)


def test_a_cluster_that_is_not_there_is_named() -> None:
    engine = ray_engine.RayEngine(RuntimeSettings(engine="ray", workers=1, address="127.0.0.1:1"))
    with pytest.raises(EngineError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        engine.execute(ServerApp(), strange_client(), 1)
