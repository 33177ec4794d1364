"""A checkpoint gives the server's state back, whole, or none at all."""

from pathlib import Path

import numpy as np

from fedsim.algorithms.state import ServerState
from fedsim.protocol.arrays import digest, to_arrays
from fedsim.runs.directory import RunDirectory
from fedsim.runs.records import RunCheckpoint


def test_a_checkpoint_is_the_state_of_the_server(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create(experiment="", environment={}, inputs={})
    assert directory.read_checkpoint() is None
    state = ServerState(
        to_arrays({"z": np.ones((2, 3), np.float32), "a": np.array(2.5)}),
        round_number=7,
        clip_norms={3: 0.1, 0: 1 / 3},
        withdrawn=frozenset({4, 1}),
        memory={"m/z": np.full((2, 3), 0.5), "momentum": np.arange(4)},
        client_memory={"z": np.ones((5, 2, 3)), "a": np.arange(5.0), "c": np.zeros((5, 0))},
    )
    directory.write_checkpoint(RunCheckpoint(state, {3: "ab"}, "cd"))
    checkpoint = directory.read_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.heads, checkpoint.rounds_digest) == ({3: "ab"}, "cd")
    found = checkpoint.state
    assert digest(found.arrays) == digest(state.arrays), "names keep their order"
    assert found.clip_norms == state.clip_norms
    assert (found.round_number, found.withdrawn) == (7, {1, 4})
    for one, other in (
        (found.memory, state.memory),
        (found.client_memory, state.client_memory),
    ):
        assert list(one) == sorted(other), "in the order of their names, whatever the file's"
        for name, array in other.items():
            np.testing.assert_array_equal(one[name], array)
