"""Without messages clients answer as over messages, and an app that must see messages does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedsim.clients.app import BatchClientApp
from fedsim.clients.task import ClientTask
from fedsim.experiment import load_experiment
from fedsim.federation.apps import client_app
from fedsim.federation.assembly import assemble
from fedsim.federation.federation import Federation
from fedsim.protocol.arrays import digest, to_arrays
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainReply, TrainRequest
from fedsim.protocol.traffic import ClientError, MessageChannel, client_channel
from fedsim.simulation.engine import FIRST_NODE
from fedsim.simulation.engines import DirectChannel, LocalGrid

CLIENTS = 6


def federation(path: Path) -> Federation:
    path.mkdir()
    experiment: dict[str, Any] = {
        "name": "channel",
        "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}},
        "model": {"name": "logistic"},
        "federation": {"rounds": 2, "deadline": 1.0},
        "local": {"steps": 2, "batch_size": 16},
        "privacy": {
            **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5},
            **{"clipping": {"name": "adaptive", "count_noise": 4.0}},
            "clients": {"2": {"target_epsilon": 0.5}},
        },
        "faults": [
            {"kind": "dropout_after", "clients": [1]},
            {"kind": "straggler", "delay": 3.0, "clients": [3]},
        ],
    }
    return assemble(load_experiment(experiment), ledger=path / "ledger.jsonl")


def broken(of: Federation) -> Any:
    """The tasks of a federation whose client 4 raises an error that is not fedsim's."""

    def raises(request: TrainRequest) -> Any:
        raise RuntimeError("patient 17")

    class Broken(ClientTask):
        release = staticmethod(raises)  # pyright: ignore[reportAssignmentType]

    def task(client: int) -> ClientTask:
        found = of.client_task(client)
        return Broken(**vars(found)) if client == 4 else found

    return task


def answers(path: Path, *, direct: bool) -> dict[tuple[int, int], Any]:
    here = federation(path)
    arrays = here.initial_arrays()
    app = BatchClientApp(broken(here), block_of=here.blocks.plan.block_of)
    grid = LocalGrid(app, CLIENTS)
    with server_identity(1):
        channel = client_channel(grid, TrainReply) if direct else MessageChannel(grid, TrainReply)
        assert isinstance(channel, DirectChannel) == direct
        found: dict[tuple[int, int], Any] = {}
        for round_number in (1, 2):
            requests = {
                FIRST_NODE + client: TrainRequest(round_number, arrays) for client in range(CLIENTS)
            }
            for node, answer in channel.train(requests, timeout=None):
                arrays_digest = None
                if isinstance(answer, TrainReply):
                    arrays_digest = digest(to_arrays(answer.arrays))
                    answer = replace(answer, arrays={})
                found[round_number, node - FIRST_NODE] = arrays_digest, answer
    return found


def test_clients_answer_without_messages_as_over_messages(tmp_path: Path) -> None:
    direct, over_messages = (answers(tmp_path / str(way), direct=way) for way in (True, False))
    kinds = {key: type(answer).__name__ for key, (_, answer) in direct.items()}
    assert len(kinds) == 2 * CLIENTS
    assert set(kinds.values()) >= {"TrainReply", "ClientError", "Withdrawal"}
    for key, (arrays, answer) in direct.items():
        other_arrays, other = over_messages[key]
        assert arrays == other_arrays
        if isinstance(answer, TrainReply):
            assert (answer.examples, answer.spend, answer.delay, answer.clip_norm) == (
                other.examples,
                other.spend,
                other.delay,
                other.clip_norm,
            )
        else:
            assert answer == other
    texts = " ".join(answer.reason for _, answer in direct.values() if type(answer) is ClientError)
    assert "RuntimeError at test_direct_channel.py" in texts
    assert "patient" not in texts


def pass_on(message: Message, context: Context, app: ClientAppCallable) -> Message:
    return app(message, context)


class Watching(LocalGrid):
    """A grid that sees messages."""

    def send_and_receive(self, *arguments: Any, **options: Any) -> Any:
        return super().send_and_receive(*arguments, **options)


def test_where_messages_must_be_seen_there_are_messages(tmp_path: Path) -> None:
    here = federation(tmp_path / "r")
    own = client_app(here)
    with_mods = BatchClientApp(here.client_task, mods=[pass_on])
    assert isinstance(client_channel(LocalGrid(own, CLIENTS), TrainReply), DirectChannel)
    for grid in (LocalGrid(ClientApp(), 1), LocalGrid(with_mods, 1), Watching(own, CLIENTS)):
        assert isinstance(client_channel(grid, TrainReply), MessageChannel)
