"""Every private part of Flower that fedsim uses is there and does what fedsim needs.

docs/decisions/flower.md lists the parts. If a version of Flower has changed one, a test names it.
"""

import ast
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "decisions" / "flower.md"
USERS = ("fedsim/protocol/flower_internals.py", "clients/app.py", "fedsim/protocol/arrays.py")
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def message(**content: Any) -> Message:
    from fedsim.protocol.flower_internals import server_identity

    with server_identity(7):
        return Message(RecordDict(content), 3, "train")


def makes_a_run(create_empty: Any) -> None:
    assert create_empty(7).run_id == 7


def identifies_a_task(identity: Any) -> None:
    from fedsim.protocol.flower_internals import server_identity

    names = ("run_id", "task_id", "node_id")
    before = [getattr(identity, f"_{name}") for name in names]
    with server_identity(7):
        assert [getattr(identity, name) for name in names[:2]] == [7, 1]
        assert Message(RecordDict(), 3, "train").metadata.run_id == 7
    assert [getattr(identity, f"_{name}") for name in names] == before


def is_the_servers_node(node_id: Any) -> None:
    assert message().metadata.src_node_id == node_id


def is_the_code_of_a_client_that_raised(code: Any) -> None:
    assert int(code) == 2  # 0 is any failure, 1 an app that cannot be loaded


def takes_an_id(kind: Any) -> None:
    from fedsim.protocol.flower_internals import set_message_id

    request = message()
    assert isinstance(request.metadata, kind)
    set_message_id(request, "id-9")
    assert request.metadata.message_id == "id-9"
    assert Message(RecordDict(), reply_to=request).metadata.reply_to_message_id == "id-9"


def is_copied_with_other_content(kind: Any) -> None:
    from fedsim.protocol.flower_internals import replace_content

    request = message(config=ConfigRecord({"n": 1}))
    other = replace_content(request, RecordDict({"config": ConfigRecord({"n": 2})}))
    assert type(other) is kind
    assert other.metadata == request.metadata
    assert [one.content["config"]["n"] for one in (request, other)] == [1, 2]


def is_the_type_of_a_mod(mod: Any) -> None:
    (message_type, _, call_next), result = get_args(mod)
    assert (message_type, result) == (Message, Message)
    assert get_args(call_next)[1] is Message


def may_be_live(kind: Any) -> None:
    from fedsim.protocol.arrays import live_record

    record = live_record({"w": np.ones(3)})
    assert isinstance(record["w"], kind)
    assert record.is_dirty  # Flower asks each array of a record for its flag
    assert type(ArrayRecord(dict(record))["w"]) is kind  # what leaves the process


CHECKS: dict[str, Callable[[Any], None]] = {
    "flwr.supercore.run.Run.create_empty": makes_a_run,
    "flwr.supercore.task_identity.TaskIdentity": identifies_a_task,
    "flwr.common.constant.SUPERLINK_NODE_ID": is_the_servers_node,
    "flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION": (
        is_the_code_of_a_client_that_raised
    ),
    "flwr.app.Metadata": takes_an_id,
    "flwr.app.Message": is_copied_with_other_content,
    "flwr.clientapp.typing.Mod": is_the_type_of_a_mod,
    "flwr.app.Array": may_be_live,
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_private_part_is_there_and_does_what_fedsim_needs(name: str) -> None:
    try:
        part = resolve_name(name)
    except (ImportError, AttributeError):
        pytest.fail(f"flwr {version('flwr')} has no {name}, see docs/decisions/flower.md")
    CHECKS[name](part)


@pytest.mark.skipif(not PAGE.exists(), reason="reads the documents of a checkout")
def test_the_decision_lists_every_private_part() -> None:
    listed = re.findall(r"^\| `(flwr[\w.]+)` \|", PAGE.read_text(), re.M)
    assert listed == list(CHECKS)
    for path in USERS:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flwr"):
                names = [f"{node.module}.{name.name}" for name in node.names]
                private = [name for name in names if node.module not in PUBLIC]
                assert all(any(part.startswith(name) for part in listed) for name in private)
