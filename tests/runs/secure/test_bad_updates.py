"""Updates that must not be summed are named and left out."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedsim.federation.secure_setup import SecureSetupError
from fedsim.runs.runner import RunFailedError


def test_an_upload_of_an_earlier_round_is_left_out(lab: Any, tmp_path: Path) -> None:
    kept: list[Any] = []

    def replay(request: Message, reply: Message) -> None:
        if request.metadata.message_type.startswith("train") and lab.party(request) == 0:
            kept.append(reply.content.copy())
            for name in ("secagg", "secagg-arrays"):
                reply.content[name] = kept[0][name]

    result = lab.run(tmp_path / "r", {}, lab.wire(twisted=replay))
    (failed,) = result.rounds[1]["failed"]
    assert failed["client"] == 0
    assert failed["reason"].startswith("ReplayError")


def test_an_update_in_clear_is_never_taken(lab: Any, tmp_path: Path) -> None:
    def expose(request: Message, reply: Message) -> None:
        if request.metadata.message_type.startswith("train") and lab.party(request) == 0:
            reply.content["arrays"] = request.content["arrays"]

    result = lab.run(tmp_path / "r", {}, lab.wire(twisted=expose))
    assert "['arrays'] in clear" in result.rounds[0]["failed"][0]["reason"]


@pytest.mark.parametrize(("protocol", "private"), [("additive", True), ("secagg", False)])
def test_bad_updates_are_found_by_the_client_and_named_without_values(
    lab: Any, tmp_path: Path, protocol: str, private: bool
) -> None:
    kinds = {
        "nan": "NonFiniteUpdateError: array '1.weight' has NaN or infinite values",
        "inf": "NonFiniteUpdateError: array '1.weight' has NaN or infinite values",
        "wrong_shape": "LayoutMismatchError: client 2: the arrays differ from the announced layout",
        "dropout_during": "dropped out during training (injected)",
        "straggler": "answered after 8 s, past the deadline of 5 s",
    }
    clients = 3 * len(kinds)  # enough to stay above the threshold of secagg
    faults = [{"kind": kind, "clients": [number]} for number, kind in enumerate(kinds)]
    faults[-1]["delay"] = 8.0
    settings = {
        "data": lab.iid(clients),
        "faults": faults,
        "federation": {"rounds": 1, "deadline": 5.0},
        "privacy": lab.privacy if private else None,
    }
    result = lab.run(tmp_path / "r", {"protocol": protocol}, **settings)
    told = [one["reason"] for one in result.rounds[0]["failed"]]
    assert len(told) == len(kinds)
    for reason, expected in zip(told, kinds.values(), strict=True):
        assert reason.startswith(expected)
    assert result.rounds[0]["participants"] == list(range(len(kinds), clients))


def test_a_value_out_of_range_is_named_or_clipped(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        lab.run(tmp_path / "e", {"encoding": {"value_bound": 1e-3}})
    reason = caught.value.result.rounds[0]["failed"][0]["reason"]
    assert reason == (
        "ValueOutOfRangeError: array '1.weight' has values above value_bound 0.001; raise "
        "secure_aggregation.encoding.value_bound, or set range_policy: clip"
    )
    clip = {"encoding": {"value_bound": 1e-3, "range_policy": "clip"}}
    secure, control = (
        lab.run(tmp_path / "c", clip),
        lab.run(tmp_path / "q", {**lab.quantized, **clip}),
    )
    lab.same_result(secure, control)


def test_nobody_is_charged_for_a_round_that_could_not_be_opened(lab: Any, tmp_path: Path) -> None:
    """Four of six clients leave: the other two are too few for a sum, and are not asked."""
    own = {"rest": {"members": [0, 1, 2, 3], "target_epsilon": 0.3}}
    privacy = {**lab.privacy, "noise_multiplier": 2.0, "on_exhausted": "withdraw", "clients": own}
    result = lab.run(
        tmp_path / "r",
        {"on_abort": "skip_round"},
        privacy=privacy,
        federation={"rounds": 12},
        data=lab.iid(lab.clients),
    )
    assert result.privacy is not None
    left = next(row["round"] for row in result.rounds if len(row["withdrawn"]) == 4)
    assert 2 < left < 12
    said = [row["secure_aggregation"]["aborted"] for row in result.rounds]
    assert said[: left - 1] == [None] * (left - 1)
    assert said[left - 1].startswith(f"TooFewClientsError: round {left}: 2 clients are left")
    for reason, row in zip(said[left:], result.rounds[left:], strict=True):
        assert "2 clients can be asked, but min_clients is 3" in reason
        assert (row["participants"], row["failed"]) == ([], [])
    spent = {spend.client: spend.rounds for spend in result.privacy.clients}
    assert spent == dict.fromkeys(range(4), left - 1) | dict.fromkeys((4, 5), left)


def test_a_client_weighing_more_than_the_bound_is_found_before_the_run(
    lab: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        SecureSetupError, match=r"aggregation\.encoding\.max_weight is 100; raise it"
    ):
        lab.run(tmp_path / "r", {"encoding": {"max_weight": 100}})
    assert not (tmp_path / "r").exists()
