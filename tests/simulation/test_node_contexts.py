"""Contexts of nodes: made on need, one for each node, and complete after a pickle."""

import pickle

import pytest
from flwr.app import ConfigRecord

from fedsim.simulation.engine import FIRST_NODE, NodeContexts


def test_a_context_is_made_on_need_and_kept() -> None:
    contexts = NodeContexts(range(100_000), num_nodes=100_000)
    assert len(contexts) == 100_000
    one = contexts[FIRST_NODE + 99_999]
    assert one is contexts[FIRST_NODE + 99_999]
    assert one.node_config == {"partition-id": 99_999, "num-partitions": 100_000}
    assert (one.run_id, one.node_id) == (1, FIRST_NODE + 99_999)
    assert len(contexts._made) == 1
    for node in (FIRST_NODE - 1, FIRST_NODE + 100_000):
        assert node not in contexts
        with pytest.raises(KeyError):
            contexts[node]


def test_a_copy_in_another_process_has_every_node_and_the_states_that_exist() -> None:
    contexts = NodeContexts((3, 1, 8), num_nodes=9)
    contexts[FIRST_NODE + 1].state["count"] = ConfigRecord({"n": 5})
    copy = pickle.loads(pickle.dumps(contexts))
    assert list(copy) == [FIRST_NODE + 3, FIRST_NODE + 1, FIRST_NODE + 8]
    assert copy[FIRST_NODE + 1].state["count"]["n"] == 5
    assert len(copy._made) == 1
    assert not copy[FIRST_NODE + 8].state
