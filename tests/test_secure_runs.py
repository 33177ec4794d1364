"""Secure aggregation in whole runs: one result with and without it, and nothing more to see."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.numpy import load_file

import fedsim
from fedsim.run_directory import RunDirectory
from fedsim.runs import RunFailedError
from fedsim.server.protocol import to_arrays
from fedsim.server.secure_aggregation.payload import PayloadCodec
from fedsim.simulation.engines import LocalEngine
from fedsim.simulation.flower_internals import server_identity
from fedsim.simulation.local_grid import FIRST_NODE, LocalGrid
from fedsim.verification import verify_run

CLIENTS = 6
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 0.5}


def experiment(secure: Mapping[str, Any] | None, **sections: Any) -> dict[str, Any]:
    federation = {"rounds": 2, "weighting": "examples", **sections.pop("federation", {})}
    return {
        "name": "secure",
        "seed": 3,
        "data": {
            "dataset": "digits",
            "partition": {"scheme": "dirichlet", "num_clients": CLIENTS, "min_examples": 20},
        },
        "model": {"name": "logistic"},
        "federation": federation,
        "local": {"steps": 2, "batch_size": 16},
        "secure_aggregation": secure,
        **sections,
    }


def party(message: Message) -> int:
    """Return the node that a message from the server goes to: clients, then helpers."""
    return message.metadata.dst_node_id - FIRST_NODE


class Wire(LocalEngine):
    """The local engine with somebody on the line.

    Args:
        lost: whether a message, or the reply to it, is lost; asked with the request.
        twisted: may change a reply.
    """

    def __init__(
        self,
        lost: Callable[[Message], bool] = lambda _: False,
        twisted: Callable[[Message, Message], None] = lambda *_: None,
    ) -> None:
        self.lost, self.twisted = lost, twisted
        self.seen: list[tuple[Message, Message]] = []
        self.grid: Grid | None = None

    def execute(self, server_app: ServerApp, client_app: ClientApp, num_nodes: int) -> None:
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
        with server_identity(1):
            self.grid = Tapped(client_app, num_nodes, self)
            server_app(self.grid, context)

    def replies(self, kind: str) -> list[tuple[Message, Message]]:
        """Return requests of a type with their replies."""
        return [pair for pair in self.seen if pair[0].metadata.message_type.endswith(kind)]


class Tapped(LocalGrid):
    def __init__(self, client_app: ClientApp, num_nodes: int, wire: Wire) -> None:
        super().__init__(client_app, num_nodes)
        self._wire = wire

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        asked = list(messages)
        by_node = {message.metadata.dst_node_id: message for message in asked}
        for reply in super().send_and_receive(asked, timeout=timeout):
            request = by_node[reply.metadata.src_node_id]
            if self._wire.lost(request):
                continue
            self._wire.twisted(request, reply)
            self._wire.seen.append((request, reply))
            yield reply


def loses(kind: str, parties: Iterable[int], rounds: Iterable[int] = ()) -> Callable[..., bool]:
    """Lose what these parties answer to requests of a type, in these rounds or in all."""
    gone, when = set(parties), set(rounds)
    now = [0]

    def lost(request: Message) -> bool:
        config = request.content.config_records.get("config")
        if config is not None:
            now[0] = int(config["server-round"])  # pyright: ignore[reportArgumentType]
        due = not when or now[0] in when
        return due and request.metadata.message_type.endswith(kind) and party(request) in gone

    return lost


def model(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


def same_result(one: fedsim.RunResult, other: fedsim.RunResult) -> None:
    """Check that two runs have one result: model, ledger and participants of every round."""
    for name in ("model.safetensors", "ledger.jsonl", "clients.csv"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes(), name
    keys = ("round", "participants", "test_loss", "epsilon_max", "withdrawn", "shortened")
    for mine, yours in zip(one.rounds, other.rounds, strict=True):
        assert [mine[key] for key in keys] == [yours[key] for key in keys]


QUANTIZED = {"protocol": "quantized"}
PROTOCOLS: dict[str, dict[str, Any]] = {
    **{f"additive-{k}": {"aggregators": k} for k in (2, 3, 4, 5)},
    "secagg": {"protocol": "secagg"},
    "secagg_plus": {"protocol": "secagg_plus"},
    "additive-32": {"ring_bits": 32, "guard_bits": 1, "max_weight": 600, "value_bound": 1.0},
    "stochastic": {"rounding": "stochastic"},
    "parameters": {"payload": "parameters"},
}
FAULTS = [
    {"kind": "dropout_before", "clients": [1], "rounds": [1]},
    {"kind": "dropout_after", "clients": [2], "rounds": [2]},
]
_SAME_NUMBERS = ("ring_bits", "guard_bits", "max_weight", "value_bound", "rounding", "payload")


def run(out: Path, secure: dict[str, Any] | None, wire: Wire | None = None, **sections: Any) -> Any:
    return fedsim.run(experiment(secure, **sections), out=out, engine=wire)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_secure_equals_quantized_bit_for_bit(tmp_path: Path, name: str, seed: int) -> None:
    """P1, over whole runs: any protocol, any number of aggregators, some clients gone."""
    numbers = {key: value for key, value in PROTOCOLS[name].items() if key in _SAME_NUMBERS}
    sections = {"seed": seed, "faults": FAULTS, "privacy": PRIVACY if seed == 4 else None}
    secure = run(tmp_path / "secure", PROTOCOLS[name], **sections)
    control = run(tmp_path / "control", {**QUANTIZED, **numbers}, **sections)
    same_result(secure, control)
    assert [len(row["participants"]) for row in secure.rounds] == [CLIENTS - 1] * 2
    assert verify_run(RunDirectory(secure.path)).problems == ()


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_first_round_is_plain_averaging_within_the_printed_bound(
    tmp_path: Path, weighting: str
) -> None:
    """P2; later rounds diverge as any two roundings do."""
    federation = {"rounds": 1, "weighting": weighting}
    plain = model(run(tmp_path / "plain", None, federation=federation).path)
    secure = run(tmp_path / "secure", {}, federation=federation)
    said = json.loads((secure.path / "privacy.json").read_text())["secure_aggregation"]
    bound = said["encoding"]["max_abs_error"]
    assert 0 < bound < 2e-10
    for name, value in model(secure.path).items():
        room = bound + np.spacing(np.abs(value))  # half an ulp for each of the two casts
        assert (np.abs(value.astype(float) - plain[name]) <= room).all()


def test_epsilon_is_that_of_the_clients_own_noise(tmp_path: Path) -> None:
    privacy = {"target_epsilon": 4.0, "delta": 1e-3, "max_grad_norm": 0.5}
    plain, secure = (
        run(tmp_path / name, section, privacy=privacy)
        for name, section in (("plain", None), ("secure", {}))
    )
    assert (plain.path / "clients.csv").read_text() == (secure.path / "clients.csv").read_text()
    statement = json.loads((secure.path / "privacy.json").read_text())["statement_points"]
    said = " ".join(point["text"] for point in statement)
    for words in (
        "saw the sum of weighted updates",
        "is not differential privacy",
        "its model, masked for all but the sum,",
        "Every mean equals that of the quantised updates bit for bit",
        "2 sums of 6 clients were opened",
        "All parties of secure aggregation ran in one simulation",
        "local_steps > 1 (2 noisy steps in a round)",
    ):
        assert words in said
    assert "saw the sum" in (secure.path / "report.html").read_text()


@pytest.mark.parametrize("cohort", ["off", 4])
def test_clients_that_train_together_upload_the_same(tmp_path: Path, cohort: Any) -> None:
    alone, together = (
        run(tmp_path / str(size), {}, privacy=PRIVACY, runtime={"cohort": size})
        for size in ("auto", cohort)
    )
    same_result(alone, together)


class Everything:
    """All bytes and whole numbers that reached the server."""

    def __init__(self, wire: Wire) -> None:
        self.bytes, self.numbers, self.records = b"", set[float](), set[str]()
        for _, reply in wire.seen:
            self.records |= set(reply.content)
            for record in reply.content.array_records.values():
                for array in record.values():
                    self.bytes += array.numpy().tobytes() + b"|"
            others = [*reply.content.config_records.values()]
            others += [*reply.content.metric_records.values()]
            for record in others:
                for value in record.values():
                    self._scalar(value)

    def _scalar(self, value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                self._scalar(one)
        elif isinstance(value, bytes):
            self.bytes += value + b"|"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers.add(value)


def leaks(everything: Everything, payloads: list[np.ndarray]) -> list[str]:
    """Return what the server could read off: pieces of payloads, weights, unexpected records."""
    found = []
    for payload in payloads:
        whole = payload.tobytes()
        pieces = [whole[start : start + 16] for start in range(0, len(whole) - 15, 16)]
        if any(set(piece) != {0} and piece in everything.bytes for piece in pieces):
            found.append("a piece of a plain update")
        weight = int(payload[-2])
        if weight in everything.numbers or payload[-2:].tobytes() in everything.bytes:
            found.append("a weight")
    allowed = {"identity", "secagg", "secagg-arrays"}
    return found + sorted(everything.records - allowed)


@pytest.mark.parametrize("name", ["additive-2", "additive-3", "secagg", "quantized"])
def test_the_servers_whole_view_holds_no_update_weight_or_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of every message that reached the server; the control arm shows that the search finds it."""
    encode, payloads = PayloadCodec.encode, []

    def recorded(*arguments: Any, **options: Any) -> Any:
        payloads.append(encode(*arguments, **options).copy())
        return encode(*arguments, **options)

    monkeypatch.setattr(PayloadCodec, "encode", recorded)
    wire = Wire()
    run(tmp_path / "r", PROTOCOLS.get(name, QUANTIZED), wire)
    assert len(payloads) == 2 * CLIENTS
    weights = {int(payload[-2]) for payload in payloads}
    assert len(weights) > 1
    assert min(weights) > 40  # no round, client or version by chance
    found = leaks(Everything(wire), payloads)
    if name == "quantized":
        assert {"a piece of a plain update", "a weight"} == set(found)
    else:
        assert found == []


def test_secrets_are_fresh_in_a_seeded_run(tmp_path: Path) -> None:
    """Two runs of one seed share the result and no byte of any share or envelope."""
    wires = Wire(), Wire()
    one, other = (run(tmp_path / str(n), {}, wire) for n, wire in enumerate(wires))
    same_result(one, other)
    shares = [
        [
            reply.content.array_records["secagg-arrays"]["share"].numpy()
            for _, reply in wire.replies("train")
        ]
        for wire in wires
    ]
    for mine, yours in zip(*shares, strict=True):
        assert not (mine == yours).any()


FIVE = {"data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 5}}}


@pytest.mark.parametrize("aggregators", [2, 3])
@pytest.mark.parametrize("gone", [0, 1, 2, 3])
@pytest.mark.parametrize("moment", ["before", "in training", "after"])
def test_dropouts_leave_the_exact_sum_of_the_others_or_a_named_error(
    tmp_path: Path, aggregators: int, gone: int, moment: str
) -> None:
    """{0, 1, n-min, n-min+1} clients of 5 with min_clients 3."""
    kinds = {"before": "dropout_before", "in training": "dropout_during"}
    kind = kinds.get(moment)
    faults = [{"kind": kind, "clients": list(range(gone))}] if kind and gone else []

    def result(name: str, secure: dict[str, Any]) -> Any:
        lost = loses("train", range(gone) if kind is None else ())
        federation = {"rounds": 1}
        return run(
            tmp_path / name, secure, Wire(lost), federation=federation, faults=faults, **FIVE
        )

    if gone <= 2:
        same_result(result("a", {"aggregators": aggregators}), result("q", QUANTIZED))
        return
    with pytest.raises(RunFailedError, match="TooFewClientsError: round 1: 2 clients are left"):
        result("a", {"aggregators": aggregators})


@pytest.mark.parametrize("protocol", ["secagg", "secagg_plus"])
@pytest.mark.parametrize(("stage", "counts"), [
    ("train", False), ("secagg_shares", False), ("secagg_masked", False), ("secagg_unmask", True),
])  # fmt: skip
def test_secagg_survives_a_dropout_in_each_stage(
    tmp_path: Path, protocol: str, stage: str, counts: bool
) -> None:
    """Who drops out after its masked update came is in the sum; who does before is not."""
    federation = {"rounds": 1}
    wire = Wire(loses(stage, [4]))
    secure = run(tmp_path / "s", {"protocol": protocol}, wire, federation=federation)
    left_out = Wire(loses("train", [] if counts else [4]))
    control = run(tmp_path / "q", QUANTIZED, left_out, federation=federation)
    same_result(secure, control)
    assert ([one["client"] for one in secure.rounds[0]["failed"]] == [4]) == (not counts)


@pytest.mark.parametrize("stage", ["secagg_shares", "secagg_masked", "secagg_unmask"])
def test_secagg_below_the_threshold_is_a_named_error(tmp_path: Path, stage: str) -> None:
    with pytest.raises(RunFailedError, match="ThresholdError") as caught:
        run(tmp_path / "r", {"protocol": "secagg"}, Wire(loses(stage, [0, 1, 2], [2])))
    assert [row["secure_aggregation"]["survivors"] for row in caught.value.result.rounds] == [6, 0]


def test_a_dead_helper_ends_the_run_and_leaves_model_and_charges(tmp_path: Path) -> None:
    lost = loses("secagg_combine", [CLIENTS], [2])
    with pytest.raises(
        RunFailedError, match=r"AggregatorUnavailableError: helpers \[1\]"
    ) as caught:
        run(tmp_path / "r", {}, Wire(lost), privacy=PRIVACY, federation={"rounds": 3})
    result = caught.value.result
    first = run(tmp_path / "one", {}, privacy=PRIVACY, federation={"rounds": 1})
    assert model(result.path).keys() == model(first.path).keys()
    for name, value in model(first.path).items():
        np.testing.assert_array_equal(model(result.path)[name], value)
    assert result.privacy is not None
    assert {spend.rounds for spend in result.privacy.clients} == {2}
    assert (result.path / "report.html").is_file()
    resumed = fedsim.run(
        experiment({}, privacy=PRIVACY, federation={"rounds": 3}), out=result.path, resume=True
    )
    same_result(resumed, run(tmp_path / "whole", {}, privacy=PRIVACY, federation={"rounds": 3}))


def test_a_round_that_cannot_be_opened_can_be_skipped(tmp_path: Path) -> None:
    secure = {"on_abort": "skip_round", "combine_retries": 1}
    wire = Wire(loses("secagg_combine", [CLIENTS], [2]))
    result = run(tmp_path / "r", secure, wire, federation={"rounds": 3})
    said = [row["secure_aggregation"] for row in result.rounds]
    assert [one["survivors"] for one in said] == [6, 0, 6]
    assert said[1]["aborted"].startswith("AggregatorUnavailableError")
    assert said[1]["retried"] == 1
    assert result.rounds[1]["test_loss"] == result.rounds[0]["test_loss"]
    assert len(result.rounds[1]["failed"]) == CLIENTS
    rounds = json.loads((result.path / "privacy.json").read_text())["secure_aggregation"]["rounds"]
    assert (rounds["completed"], rounds["aborted"], rounds["retried"]) == (2, 1, 1)


def test_a_helper_that_is_asked_again_gives_the_same_share(tmp_path: Path) -> None:
    asked: list[int] = []

    def lost(request: Message) -> bool:
        if not request.metadata.message_type.endswith("secagg_combine"):
            return False
        asked.append(party(request))
        return len(asked) == 1

    result = run(tmp_path / "r", {}, Wire(lost))
    same_result(result, run(tmp_path / "q", QUANTIZED))
    assert [row["secure_aggregation"]["retried"] for row in result.rounds] == [1, 0]


def test_two_sums_of_one_round_are_refused(tmp_path: Path) -> None:
    """The differencing attack: x_i = S(U) - S(U without i); over messages, on the helper's node."""
    answers: list[Message] = []
    wire = Wire()

    def attack(request: Message, reply: Message) -> None:
        if not request.metadata.message_type.endswith("secagg_combine") or answers:
            return
        config = request.content.config_records["secagg"]
        for without in (False, True):
            asked = dict(config)
            if without:
                asked["clients"] = list(config["clients"])[1:]  # pyright: ignore[reportArgumentType]
                asked["envelopes"] = list(config["envelopes"])[1:]  # pyright: ignore[reportArgumentType]
            answers.append(reply)
            message = _like(request, asked)
            assert wire.grid is not None
            (answer,) = super(type(wire.grid), wire.grid).send_and_receive([message])  # pyright: ignore[reportAttributeAccessIssue]
            answers.append(answer)

    wire.twisted = attack
    run(tmp_path / "r", {}, wire)
    genuine, same, _, different = (one.content.config_records["secagg"] for one in answers)
    assert (genuine["kind"], same["kind"]) == ("CombineReply", "CombineReply")
    first, again = (
        one.content.array_records["secagg-arrays"]["total"].numpy() for one in answers[:2]
    )
    np.testing.assert_array_equal(first, again)
    assert (different["kind"], different["error"]) == ("Refusal", "AlreadyAnsweredError")
    assert "secagg-arrays" not in answers[3].content


def _like(request: Message, config: dict[str, Any]) -> Message:
    content = RecordDict({"secagg": ConfigRecord(config)})
    return Message(content, request.metadata.dst_node_id, request.metadata.message_type)


def test_a_flipped_bit_of_a_helpers_share_never_reaches_the_model(tmp_path: Path) -> None:
    def flip(request: Message, reply: Message) -> None:
        if request.metadata.message_type.endswith("secagg_combine"):
            total = reply.content.array_records["secagg-arrays"]["total"].numpy().copy()
            total[3] ^= np.uint64(1)
            reply.content["secagg-arrays"] = to_arrays({"total": total})

    with pytest.raises(RunFailedError, match="ShareMismatchError"):
        run(tmp_path / "r", {}, Wire(twisted=flip))


def test_an_upload_of_an_earlier_round_is_left_out(tmp_path: Path) -> None:
    kept: list[Any] = []

    def replay(request: Message, reply: Message) -> None:
        if request.metadata.message_type.startswith("train") and party(request) == 0:
            kept.append(reply.content.copy())
            for name in ("secagg", "secagg-arrays"):
                reply.content[name] = kept[0][name]

    result = run(tmp_path / "r", {}, Wire(twisted=replay))
    (failed,) = result.rounds[1]["failed"]
    assert failed["client"] == 0
    assert failed["reason"].startswith("ReplayError")


def test_an_update_in_clear_is_never_taken(tmp_path: Path) -> None:
    def expose(request: Message, reply: Message) -> None:
        if request.metadata.message_type.startswith("train") and party(request) == 0:
            reply.content["arrays"] = request.content["arrays"]

    result = run(tmp_path / "r", {}, Wire(twisted=expose))
    assert "['arrays'] in clear" in result.rounds[0]["failed"][0]["reason"]


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_bad_updates_are_found_by_the_client_and_named_without_values(
    tmp_path: Path, protocol: str
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
    data = {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": clients}}
    settings = {"data": data, "faults": faults, "federation": {"rounds": 1, "deadline": 5.0}}
    for privacy in (None, PRIVACY):
        out = tmp_path / f"{privacy is None}"
        result = run(out, {"protocol": protocol}, privacy=privacy, **settings)
        told = [one["reason"] for one in result.rounds[0]["failed"]]
        assert len(told) == len(kinds)
        for reason, expected in zip(told, kinds.values(), strict=True):
            assert reason.startswith(expected)
        assert result.rounds[0]["participants"] == list(range(len(kinds), clients))


def test_a_value_out_of_range_is_named_or_clipped(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        run(tmp_path / "e", {"value_bound": 1e-3})
    reason = caught.value.result.rounds[0]["failed"][0]["reason"]
    assert reason == (
        "ValueOutOfRangeError: array '1.weight' has values above value_bound 0.001; raise "
        "secure_aggregation.value_bound, or say range_policy: clip"
    )
    clip = {"value_bound": 1e-3, "range_policy": "clip"}
    secure, control = run(tmp_path / "c", clip), run(tmp_path / "q", {**QUANTIZED, **clip})
    same_result(secure, control)


def test_nobody_is_charged_for_a_round_that_could_not_be_opened(tmp_path: Path) -> None:
    """Four of six clients leave: the other two are too few to hide among, and are not asked."""
    own = {"rest": {"members": [0, 1, 2, 3], "target_epsilon": 0.3}}
    privacy = {**PRIVACY, "noise_multiplier": 2.0, "on_exhausted": "withdraw", "clients": own}
    result = run(
        tmp_path / "r",
        {"on_abort": "skip_round"},
        privacy=privacy,
        federation={"rounds": 12},
        **_even(),
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


def _even() -> dict[str, Any]:
    data = {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": CLIENTS}}
    return {"data": data}


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path: Path, protocol: str) -> None:
    class Stop:
        def started(self, federation: object, path: Path) -> None: ...

        def round_finished(self, row: Any) -> None:
            if row["round"] == 1:
                raise KeyboardInterrupt

        def ended(self) -> None: ...

    secure = experiment({"protocol": protocol}, privacy=PRIVACY, federation={"rounds": 3})
    whole = fedsim.run(secure, out=tmp_path / "whole")
    assert fedsim.run(secure, out=tmp_path / "r", observer=Stop()).status == "interrupted"
    result = fedsim.run(secure, out=tmp_path / "r", resume=True)
    same_result(whole, result)
    assert (whole.path / "privacy.json").read_bytes() == (result.path / "privacy.json").read_bytes()


@pytest.mark.parametrize("protocol", ["additive", "secagg"])
def test_a_run_that_dies_inside_a_round_resumes_to_the_same_result(
    tmp_path: Path, protocol: str
) -> None:
    """Charged and uploaded, but not opened: the round is repeated under a new run id."""
    stage = "secagg_combine" if protocol == "additive" else "secagg_masked"

    def power_cut(request: Message) -> bool:
        if request.metadata.message_type.endswith(stage):
            raise KeyboardInterrupt
        return False

    secure = experiment({"protocol": protocol}, privacy=PRIVACY)
    whole = fedsim.run(secure, out=tmp_path / "whole")
    cut = fedsim.run(secure, out=tmp_path / "r", engine=Wire(power_cut))
    assert (cut.status, cut.rounds) == ("interrupted", ())
    assert cut.privacy is not None
    assert {spend.rounds for spend in cut.privacy.clients} == {1}
    same_result(whole, fedsim.run(secure, out=tmp_path / "r", resume=True))


def test_a_client_weighing_more_than_the_bound_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"aggregation\.max_weight is 100; raise it"):
        run(tmp_path / "r", {"max_weight": 100})
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
@pytest.mark.parametrize("secure", [{"aggregators": 3}, {"protocol": "secagg"}], ids=str)
def test_every_engine_has_the_same_result(
    tmp_path: Path, engine: str, secure: dict[str, Any]
) -> None:
    pytest.importorskip("ray")
    sections = {"privacy": PRIVACY, "faults": FAULTS}
    local = run(tmp_path / "local", secure, **sections)
    other = run(tmp_path / engine, secure, runtime={"engine": engine, "workers": 2}, **sections)
    for name in ("model.safetensors", "privacy.json", "clients.csv"):
        assert (local.path / name).read_bytes() == (other.path / name).read_bytes(), name
