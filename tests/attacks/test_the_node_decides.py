"""A node's own policy limits what a server can ask; a refused request is charged nothing."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedsim.accountant import Gaussian, NonPrivate, PrivacyLedger
from fedsim.accountant.ledger.journal import Charge, FileJournal
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.plan import PlanRequest
from fedsim.clients.mechanisms.planner import plan_privacy
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.experiment import load_experiment
from fedsim.protocol.flower_internals import server_identity
from fedsim.protocol.messages import TrainRequest
from fedsim.protocol.node_registration import registration_message
from fedsim.tools.deployment.client_app import NodeClient
from fedsim.tools.deployment.data_ledger import (
    DataCharge,
    DataLedger,
    count_affordable,
    open_data_ledger,
)
from fedsim.tools.deployment.flower_app import write_app
from fedsim.tools.deployment.node_state import NodeJournal
from fedsim.tools.deployment.policy import NodePolicy
from fedsim.tools.deployment.policy_rules import PolicyRefusalError, check_experiment
from fedsim.tools.deployment.private_files import DeploymentError

EXPERIMENT: dict[str, Any] = {
    "name": "asked",
    "data": {"dataset": "digits", "partition": {"scheme": "dirichlet", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 5},
    "local": {"steps": 2, "batch_size": 64},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 0.5},
}
MODEL = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Flatten(), {})\n"
LINEAR = "nn.Linear(64, 10)"
ASKED, EPSILON = 6, 1.2  # rounds that each of several processes wants, and their budget


class Attacker:
    """A server that sends one node whatever it likes, and the node's policy and state."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / "state"

    def policy(self, **keys: object) -> None:
        self.state.mkdir(mode=0o700, exist_ok=True)
        path = self.state / "policy.yaml"
        path.write_text(yaml.safe_dump(keys))
        path.chmod(0o600)

    def asks(self, round_number: int = 1, model: float = 0.0, /, **changes: object) -> Message:
        """Send the request of a round, for a global model whose values are all `model`."""
        arrays = ArrayRecord(
            {"1.weight": torch.full((10, 64), model), "1.bias": torch.full((10,), model)}
        )
        return self.sends(TrainRequest(round_number, arrays).to_message(5), **changes)

    def sends(self, message: Message, **changes: object) -> Message:
        app = self.home / "app"
        app.mkdir(exist_ok=True)
        content = deepcopy(EXPERIMENT)
        for key, value in changes.items():
            *folders, name = key.split(".")
            section = content
            for folder in folders:
                section = section.setdefault(folder, {})
            section[name] = value
        (app / "experiment.yaml").write_text(yaml.safe_dump(content))
        config: dict[str, Any] = {"partition-id": 0, "state": str(self.state)}
        context = Context(
            run_id=1, node_id=5, node_config=config, state=RecordDict(), run_config={}
        )
        return NodeClient(app)(message, context)

    def asks_of_table(self, path: Path, features: int = 2, /, **changes: object) -> Message:
        """Send the request of a first round on a table that `table` wrote."""
        weight = torch.zeros(2, features)
        arrays = ArrayRecord({"1.weight": weight, "1.bias": torch.zeros(2)})
        small = {"data.dataset": {"path": str(path), "target": "ill"}, "local.batch_size": 8}
        return self.sends(TrainRequest(1, arrays).to_message(5), **small | changes)

    def charges(self) -> list[tuple[int, int]]:
        """Return (seed, round) of every charge in the ledgers of experiments."""
        found = [
            (int(path.parts[-3].removeprefix("seed-")), charge.round_number)
            for path in sorted(self.state.glob("seed-*/client-0/ledger.jsonl"))
            for charge in FileJournal(path).history(0)
        ]
        return sorted(found)

    def data_charges(self, name: str = "code") -> list[tuple[int, int]]:
        """Return (seed, round) of every charge in the ledger of some data."""
        with open_data_ledger(self.state / "data" / name) as ledger:
            return sorted((one.seed, one.round) for one in ledger.charges)

    def spent(self, name: str = "code", delta: float = 1e-5) -> float:
        """Return the ε of everything in the ledger of some data, by the tightest accountant."""
        total = PrivacyLedger()
        with open_data_ledger(self.state / "data" / name) as ledger:
            for charge in ledger.charges:
                total.merge(charge.ledger)
        return total.epsilon(delta)


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    with server_identity(1):
        yield


@pytest.fixture
def attacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attacker:
    monkeypatch.delenv("FEDSIM_POLICY", raising=False)
    return Attacker(tmp_path)


def reason(reply: Message) -> str:
    assert reply.has_error(), "the node answered"
    return str(reply.error.reason)


def answered(reply: Message) -> bool:
    assert not reply.has_error(), reply.error.reason
    return "arrays" in reply.content


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_rounds_beyond_the_experiment_are_refused(attacker: Attacker, noise: str) -> None:
    """60 rounds of an experiment of 5: also under secure noise, where each answer is a new one."""
    changes: dict[str, Any] = {"federation.rounds": 2, "privacy.noise": noise}
    reason(attacker.asks(10**9, **changes))
    assert attacker.charges() == [], "a far round locks nobody out"
    for round_number in (1, 2):
        assert answered(attacker.asks(round_number, **changes))
    for asked in (3, 60, 10**9):
        text = reason(attacker.asks(asked, **changes))
        assert f"for round {asked}, and 'asked' has federation.rounds: 2" in text
    if noise == "secure":
        text = reason(attacker.asks(2, 1.0, **changes))
        assert "needs 2 steps, and 'asked' plans 4 for this client, of which 4 are taken" in text
        assert "answered round 2 already" in reason(attacker.asks(1, 1.0, **changes))
    assert attacker.charges() == attacker.data_charges() == [(0, 1), (0, 2)]


def test_more_rounds_in_a_new_app_are_refused(attacker: Attacker) -> None:
    attacker.policy(max_rounds=5)
    assert answered(attacker.asks(1))
    text = reason(attacker.asks(2, **{"federation.rounds": 60}))
    assert "max_rounds is 5, and federation.rounds is 60: lower federation.rounds to 5" in text
    assert attacker.charges() == [(0, 1)]
    assert answered(attacker.asks(2))


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_new_seeds_have_one_budget_together(attacker: Attacker, noise: str) -> None:
    """A new seed is another partition, other examples and a new ledger, and no new budget."""
    attacker.policy(max_epsilon=4.0, delta=1e-5)
    once = {"federation.rounds": 1, "privacy.noise": noise, "privacy.noise_multiplier": 0.85}
    replies = (attacker.asks(1, seed=seed, **once) for seed in range(20))
    granted = sum(1 for _ in takewhile(lambda reply: not reply.has_error(), replies))
    assert 1 < granted < 20
    text = reason(attacker.asks(1, seed=99, **once))
    assert "max_epsilon is 4 at δ = 1e-05 for all experiments" in text
    assert "raise max_epsilon" in text
    assert [seed for seed, _ in attacker.charges()] == list(range(granted))
    assert attacker.charges() == attacker.data_charges()
    assert 2.0 < attacker.spent() <= 4.0
    if noise == "seeded":
        assert answered(attacker.asks(1, **once)), "the same bits are free"


def test_a_run_that_does_not_fit_is_refused_before_its_first_round(attacker: Attacker) -> None:
    attacker.policy(max_epsilon=4.0, delta=1e-5)
    text = reason(attacker.asks(1, **{"federation.rounds": 60}))
    assert "all rounds of 'asked' would exceed it: of 120 releases" in text
    assert attacker.charges() == []


@pytest.mark.parametrize(
    ("policy", "changes", "rule"),
    [
        (
            {"min_noise_multiplier": 0.5},
            {"privacy.noise_multiplier": 0.001},
            "min_noise_multiplier is 0.5, and this client's noise multiplier would be 0.001",
        ),
        (
            {"max_epsilon": 8.0, "delta": 1e-5},
            {"privacy.noise_multiplier": 0.001},
            "max_epsilon is 8 at δ = 1e-05",
        ),
        (
            {"require_privacy": True, "require_secure_noise": False},
            {"privacy.noise_multiplier": 0.0},
            "require_privacy is true, and this client's noise multiplier would be 0",
        ),
        ({}, {"privacy": None}, "require_privacy is true, and 'asked' has privacy: null"),
        (None, {"privacy": None}, "require_privacy is true, and 'asked' has privacy: null"),
        (
            {"require_secure_noise": True},
            {},
            "require_secure_noise is true, and privacy.noise is seeded: set privacy.noise: secure",
        ),
    ],
)
def test_too_little_noise_is_refused(
    attacker: Attacker,
    policy: Mapping[str, object] | None,
    changes: Mapping[str, object],
    rule: str,
) -> None:
    if policy:
        attacker.policy(**policy)
    assert rule in reason(attacker.asks(1, **changes))
    assert attacker.charges() == []
    if not (policy or {}).get("require_secure_noise"):
        assert answered(attacker.asks(1)), "the refusal locked the node out"


def test_without_a_file_private_experiments_are_answered_with_a_warning(
    attacker: Attacker, logged: Any
) -> None:
    assert answered(attacker.asks(1))
    warnings = [one.getMessage() for one in logged.records if one.levelname == "WARNING"]
    (warning,) = (one for one in warnings if "this node has no policy" in one)
    assert f"fedsim node-policy {attacker.state / 'policy.yaml'}" in warning


def test_a_refused_experiment_leaves_no_trace(attacker: Attacker) -> None:
    """Otherwise it would take the seed of an experiment that is allowed."""
    attacker.policy(max_rounds=5)
    message = registration_message(5)
    assert "max_rounds is 5" in reason(attacker.sends(message, **{"federation.rounds": 6}))
    assert [path.name for path in attacker.state.iterdir()] == ["policy.yaml"]


def test_a_repeated_request_is_not_charged_twice(attacker: Attacker) -> None:
    attacker.policy(max_epsilon=4.0, delta=1e-5)
    first, again = (attacker.asks(1, **{"federation.rounds": 2}) for _ in range(2))
    assert first.content.array_records == again.content.array_records
    assert attacker.charges() == attacker.data_charges() == [(0, 1)]


def test_what_was_answered_without_privacy_has_no_epsilon(attacker: Attacker) -> None:
    """A budget that is set later does not hold any more, and the node does not pretend it does."""
    attacker.policy(require_privacy=False)
    assert answered(attacker.asks(1, privacy=None))
    attacker.policy(max_epsilon=8.0, delta=1e-5)
    text = reason(attacker.asks(1, seed=1))
    assert "of 10 releases 0 fit" in text
    attacker.policy(max_epsilon=8.0, delta=1e-5, data_name="other-data")
    assert answered(attacker.asks(1, seed=1))


def test_a_removed_client_ledger_frees_no_noise(attacker: Attacker) -> None:
    """The ledger of the data still knows what seeded noise was used for, and what was spent."""
    assert answered(attacker.asks(1))
    for path in (attacker.state / "seed-0" / "client-0").iterdir():
        path.unlink()
    text = reason(attacker.asks(1, **{"local.batch_size": 32}))
    assert "charged for another answer with seed 0 in round 1" in text
    for path in (attacker.state / "seed-0" / "client-0").iterdir():
        path.unlink()
    assert answered(attacker.asks(1)), "the same bits"
    assert attacker.charges() == attacker.data_charges() == [(0, 1)]


def test_charges_of_an_older_ledger_count(attacker: Attacker) -> None:
    """The ledger of the data was lost, or has a new name: the experiment's charges are added."""
    assert answered(attacker.asks(1))
    attacker.policy(data_name="hospital-7")
    assert answered(attacker.asks(2))
    assert attacker.data_charges("hospital-7") == [(0, 1), (0, 2)]


def test_a_changed_ledger_of_the_data_is_refused(attacker: Attacker) -> None:
    assert answered(attacker.asks(1))
    assert answered(attacker.asks(2))
    path = attacker.state / "data" / "code" / "ledger.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    for forged in (second, first.replace('"round":1', '"round":3') + second, "{}\n", "\0\0\n"):
        path.write_text(forged)
        text = reason(attacker.asks(3))
        assert "ledger.jsonl, line 1" in text
    assert attacker.charges() == [(0, 1), (0, 2)]
    path.write_text(first + second + '{"half": of a record')
    assert answered(attacker.asks(3))
    assert attacker.data_charges() == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_crash_between_both_ledgers_leaves_no_free_answer(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """Seeded noise is the same again, charged once; secure noise is charged once too much."""

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(FileJournal, "append_all", crash)
        reason(attacker.asks(1, **{"privacy.noise": noise}))
    assert (attacker.charges(), attacker.data_charges()) == ([], [(0, 1)])
    assert answered(attacker.asks(1, **{"privacy.noise": noise}))
    assert attacker.charges() == [(0, 1)]
    assert attacker.data_charges() == [(0, 1)] * (1 if noise == "seeded" else 2)


def table(path: Path, *, more: bool = False) -> None:
    rows = [f"{n},{n % 3},{n % 2}\n" for n in range(200 + 20 * more)]
    path.write_text("a,b,ill\n" + "".join(rows))


def test_one_file_has_one_ledger_whatever_the_server_makes_of_it(attacker: Attacker) -> None:
    """Partition, seed and name of the file change the client's examples, and not the ledger."""
    for name in ("h.csv", "copy.csv"):
        table(attacker.home / name)
    table(attacker.home / "grown.csv", more=True)

    files = {str(attacker.home / name): "all" for name in ("h.csv", "copy.csv", "grown.csv")}
    attacker.policy(files=files)

    def asks(seed: int, name: str, **changes: object) -> Message:
        return attacker.asks_of_table(attacker.home / name, seed=seed, **changes)

    assert answered(asks(0, "h.csv"))
    assert answered(asks(1, "copy.csv"))
    assert answered(asks(2, "h.csv", **{"data.partition": {"scheme": "iid", "num_clients": 4}}))
    (ledger,) = (attacker.state / "data").iterdir()
    assert attacker.data_charges(ledger.name) == [(0, 1), (1, 1), (2, 1)]
    assert answered(asks(3, "grown.csv"))
    assert len(list((attacker.state / "data").iterdir())) == 2, "a new content, a new ledger"
    attacker.policy(data_name="hospital-7", files=files)
    assert answered(asks(4, "h.csv"))
    assert answered(asks(5, "grown.csv"))
    assert attacker.data_charges("hospital-7") == [(4, 1), (5, 1)]


def test_plug_ins_that_the_policy_does_not_name_are_not_imported(
    attacker: Attacker, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(MODEL.format(LINEAR))
    changes = {"model": {"name": "./net.py:build"}}
    written = write_app(load_experiment(EXPERIMENT, changes, base=tmp_path), tmp_path / "out")
    assert written.plugin_digest is not None
    attacker.policy(plugin_digests=[written.plugin_digest])
    app = attacker.home / "app"
    app.mkdir()
    arrays = ArrayRecord({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)})

    def asks(source: str) -> Message:
        (app / "net.py").write_text(source)
        return attacker.sends(TrainRequest(1, arrays).to_message(5), **changes)

    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    text = reason(asks(trap + MODEL.format(LINEAR)))
    assert "plugin_digests lacks " in text
    assert "the digest of ./net.py:build" in text
    assert not (tmp_path / "ran").exists(), "refused code ran"
    assert answered(asks(MODEL.format(LINEAR)))
    installed = {"model": {"name": "os:system", "args": {"command": f"touch {tmp_path / 'ran'}"}}}
    text = reason(attacker.sends(registration_message(5), **installed))
    assert "the digest of os:system" in text
    assert not (tmp_path / "ran").exists()
    attacker.policy(plugin_digests=[])
    assert answered(attacker.asks(1, seed=1)), "built-in names need no digest"


def test_updates_go_to_pinned_helpers_only(attacker: Attacker) -> None:
    ours, other = "a" * 64, "b" * 64
    attacker.policy(helpers=[ours])

    def ask(secure: object) -> str:
        return reason(attacker.asks(1, secure_aggregation=secure))

    assert "the experiment has none: set secure_aggregation" in ask(None)
    assert "the experiment has none" in ask({"protocol": "secagg", "min_clients": 2})
    assert "keys.helper_fingerprints is empty" in ask({"min_clients": 2})
    pinned = {"min_clients": 2, "keys": {"helper_fingerprints": [other]}}
    assert f"helpers lacks {other}" in ask(pinned)
    reply = attacker.sends(
        registration_message(5),
        secure_aggregation={**pinned, "keys": {"helper_fingerprints": [ours]}},
    )
    assert not reply.has_error()
    assert attacker.charges() == []


def test_mixed_adjacencies_count_at_the_larger_cost(attacker: Attacker) -> None:
    """One charge of replace_one, and all count as replace_one: twice the sensitivity."""
    attacker.policy(max_epsilon=8.0, delta=1e-5)
    once = {"federation.rounds": 1, "local.steps": 15, "privacy.noise_multiplier": 1.0}
    assert answered(attacker.asks(1, **once, **{"privacy.adjacency": "replace_one"}))
    replies = (attacker.asks(1, seed=seed, **once) for seed in range(1, 40))
    granted = sum(1 for _ in takewhile(lambda reply: not reply.has_error(), replies))
    assert 1 <= granted < 39
    total = PrivacyLedger()
    with open_data_ledger(attacker.state / "data" / "code") as ledger:
        assert {one.adjacency for one in ledger.charges} == {"zero_out", "replace_one"}
        for charge in ledger.charges:
            total.merge(charge.ledger)
    assert total.epsilon(1e-5, adjacency="replace_one") <= 8.0
    assert total.epsilon(1e-5, adjacency="zero_out") < 4.5


@pytest.mark.skipif(os.name != "posix", reason="starts processes with fork")
def test_processes_that_charge_at_once_share_one_budget(
    tmp_path: Path, at_once: Callable[..., list[int]]
) -> None:
    """Check and charge are one step, under one lock: six processes, each with its own seed."""
    privacy = PrivacySettings(noise_multiplier=2.0, delta=1e-5, max_grad_norm=1.0)
    local = LocalSettings(steps=1, batch_size=10)
    plan = plan_privacy(PlanRequest(privacy, local, examples=100, planned_rounds=ASKED))

    def granted(seed: int) -> int:
        """Charge round after round until the policy refuses."""
        own = FileJournal(tmp_path / f"own-{seed}.jsonl")
        journal = NodeJournal(
            run_journal=own,
            state=tmp_path / "state",
            data=tmp_path / "state" / "data" / "code",
            policy=NodePolicy(max_epsilon=EPSILON, delta=1e-5),
            plan=plan,
            experiment=load_experiment(EXPERIMENT, {"seed": seed}).experiment,
        )
        for number in range(1, ASKED + 1):
            event = PrivacyLedger().record(*plan.release.charges(number - 1, 1)[0])
            try:
                journal.append_all([Charge(0, number, "", 1, event, own.head(0))])
            except PolicyRefusalError:
                return number - 1
        return ASKED

    total = sum(at_once(granted, range(6)))
    with open_data_ledger(tmp_path / "state" / "data" / "code") as ledger:
        events = [event for one in ledger.charges for event, _ in one.ledger.entries]
    affordable = count_affordable({}, [(events[0], 1000)], epsilon=EPSILON, delta=1e-5)
    assert ASKED < affordable < 6 * ASKED
    assert len(events) == total <= affordable
    assert affordable - total < ASKED, "refused as a whole run only, before its first round"


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_policy_that_others_can_change_is_none(attacker: Attacker) -> None:
    attacker.policy(max_rounds=5)
    (attacker.state / "policy.yaml").chmod(0o620)
    assert "can be changed by other users (mode 620): chmod 600" in reason(attacker.asks(1))


@pytest.mark.parametrize("content", ["max_epsilon: 8\n", "max_rounds: [\n", "", "a: 1\n"])
def test_a_policy_with_mistakes_answers_nothing(attacker: Attacker, content: str) -> None:
    attacker.policy()
    (attacker.state / "policy.yaml").write_text(content)
    text = reason(attacker.asks(1))
    assert "nothing is answered; on the node, run: fedsim node-policy" in text
    assert "\n" not in text
    assert attacker.charges() == []


def test_a_named_policy_must_be_there(attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost file is not the same as no file."""
    monkeypatch.setenv("FEDSIM_POLICY", str(attacker.home / "gone.yaml"))
    assert "this node's policy cannot be used" in reason(attacker.asks(1))
    monkeypatch.setenv("FEDSIM_POLICY", "gone.yaml")
    assert "FEDSIM_POLICY: must be an absolute path" in reason(attacker.asks(1))


def test_a_policy_that_is_a_link_to_nothing_answers_nothing(attacker: Attacker) -> None:
    """It was no policy: the node answered without a limit."""
    attacker.state.mkdir(mode=0o700)
    (attacker.state / "policy.yaml").symlink_to(attacker.home / "gone.yaml")
    assert "this node's policy cannot be used" in reason(attacker.asks(1))
    assert attacker.charges() == []


SECRETS = ("patient-0", "patient-1", "cancer", "table.csv", "60", "48")
TABLE: dict[str, Any] = {
    "target": "ill",
    "columns": {"patient": "drop", "dx": {"classes": ["healthy", "cancer"]}},
}
IID: dict[str, Any] = {"scheme": "iid", "num_clients": 2}
PATIENTS: dict[str, Any] = {"scheme": "column", "column": "patient", "num_clients": 7}


@pytest.mark.parametrize(
    ("dataset", "partition"),
    [
        ({"columns": {"dx": {"classes": ["healthy", "cancer"]}}}, PATIENTS),
        ({"columns": {"patient": "drop", "dx": {"classes": ["healthy", "other"]}}}, IID),
        ({"target": "outcome"}, IID),
        ({"columns": {"patient": {"range": [0, 1]}, "dx": "drop"}}, IID),
        ({}, {**IID, "min_examples": 100}),
    ],
)
def test_a_node_tells_nothing_of_its_data(
    attacker: Attacker,
    logged: Any,
    dataset: dict[str, Any],
    partition: dict[str, Any],
) -> None:
    """Names of clients, categories, sizes and columns were in the text of an error."""
    rows = [f"patient-{i % 3},{i},{('healthy', 'cancer')[i % 2]},{i % 2}" for i in range(60)]
    path = attacker.home / "table.csv"
    path.write_text("\n".join(["patient,age,dx,ill", *rows]))
    attacker.policy(files={str(path): "all"})
    data = {"dataset": {**TABLE, "path": str(path), **dataset}, "partition": partition}
    found = reason(attacker.asks(1, data=data))
    assert re.fullmatch(r"\w+: this node cannot answer; its own log says why", found), found
    assert not any(secret in found for secret in SECRETS)
    assert any(one.exc_info for one in logged.records), "the log has the whole text"
    assert attacker.charges() == []


@pytest.mark.parametrize("policy", [None, {}, {"files": {"/other.csv": "all"}}])
def test_files_that_the_policy_does_not_name_are_not_read(
    attacker: Attacker, policy: dict[str, Any] | None
) -> None:
    """A server may name any file that the process can read, also by a link and as weights."""
    if policy is not None:
        attacker.policy(**policy)
    secret, missing = attacker.home / "secret.csv", attacker.home / "missing.csv"
    table(secret)
    (attacker.home / "app").mkdir()
    (attacker.home / "app" / "link.csv").symlink_to(secret)
    for path in (secret, missing, "../secret.csv", "link.csv"):
        assert "files does not name" in reason(attacker.asks_of_table(Path(path)))
    assert "files does not name" in reason(attacker.asks(**{"model.init": str(secret)}))
    trace = {"scheme": "trace", "path": str(secret)}
    assert "files does not name" in reason(attacker.asks(**{"federation.participation": trace}))
    anything = {"scheme": "files", "pattern": "/**", "num_clients": 2}
    data = {"dataset": {"target": "ill"}, "partition": anything}
    assert "reads whatever a pattern matches" in reason(attacker.asks(data=data))
    (attacker.home / "app" / "folder").mkdir()  # its README.md may name the secret file
    division = {"scheme": "iid", "num_clients": 2}
    data = {"dataset": "huggingface", "args": {"path": "folder"}, "partition": division}
    assert "files does not name" in reason(attacker.asks(data=data))
    assert attacker.charges() == []


def test_columns_that_the_policy_does_not_name_are_not_used(
    attacker: Attacker, logged: Any
) -> None:
    path = attacker.home / "h.csv"
    table(path)
    attacker.policy(files={str(path): ["a", "ill"]})
    dropped = {"path": str(path), "target": "ill", "columns": {"b": "drop"}}
    by_column = {"scheme": "column", "column": "b", "num_clients": 3}
    for changes in (
        {},
        {"data.dataset": {"path": str(path), "target": "b", "columns": {"ill": "drop"}}},
        {"data.partition": by_column},
    ):
        found = reason(attacker.asks_of_table(path, **changes))
        assert found.endswith(
            f"the experiment uses columns of {path} that files does not list, as this node's log "
            "says: drop them in data.dataset.columns"
        )
        assert f"lacks columns of {path}: ['b']" in logged.text
        logged.records.clear()
    assert attacker.charges() == []
    assert answered(attacker.asks_of_table(path, 1, **{"data.dataset": dropped}))


@pytest.fixture(scope="module")
def charged_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a node with charges of two experiments, and its first ledger as `old copy`."""
    home = tmp_path_factory.mktemp("charged")
    node = Attacker(home)
    node.policy(max_epsilon=6.0, delta=1e-5)
    for seed in (1, 2):
        with server_identity(1):
            assert answered(node.asks(1, seed=seed, **{"federation.rounds": 1}))
        if seed == 1:
            shutil.copy(node.state / "data" / "code" / "ledger.jsonl", home / "old copy")
    return home


@pytest.mark.parametrize("loss", ["ledger", "old copy", "data", "count", "data and counts"])
def test_charges_that_are_gone_from_one_place_are_not_forgotten(
    attacker: Attacker, charged_twice: Path, loss: str
) -> None:
    """The budget was whole again, although the clients' own ledgers had all charges."""
    shutil.copytree(charged_twice / "state", attacker.state)
    ledger, count = (attacker.state / place / "code" for place in ("data", "counts"))
    ledger /= "ledger.jsonl"
    match loss:
        case "ledger" | "count":
            (ledger if loss == "ledger" else count).unlink()
        case "old copy":
            ledger.write_bytes((charged_twice / "old copy").read_bytes())
        case _:
            for name in loss.split(" and "):
                shutil.rmtree(attacker.state / name)
    text = reason(attacker.asks(1, seed=3, **{"federation.rounds": 1}))
    assert "restore" in text
    assert attacker.charges() == [(1, 1), (2, 1)]


def test_a_crash_before_the_count_locks_nobody_out(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError("power cut")

    for round_number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(DataLedger, "_write_count", crash)
            reason(attacker.asks(round_number))
        assert answered(attacker.asks(round_number))
    assert attacker.charges() == attacker.data_charges() == [(0, 1), (0, 2)]


def test_an_unknown_plan_is_refused_and_charged_nothing(attacker: Attacker) -> None:
    attacker.policy(plan_digests=["0" * 64])
    text = reason(attacker.asks(1))
    assert "plan_digests lacks " in text
    (digest,) = re.findall(r"lacks ([0-9a-f]{64}),", text)
    attacker.policy(plan_digests=[digest])
    assert answered(attacker.asks(1))
    for changes in (
        {"privacy.noise_multiplier": 0.9},
        {"privacy.max_grad_norm": 0.6},
        {"local.batch_size": 65},
        {"secure_aggregation": {"min_clients": 2}},
    ):
        assert "plan_digests lacks " in reason(attacker.asks(1, seed=1, **changes)), changes
    assert attacker.charges() == [(0, 1)]


def test_central_trust_needs_a_node_that_trusts_the_server(attacker: Attacker) -> None:
    """The sums of such a client have no noise of its own."""
    loaded = load_experiment(EXPERIMENT, {}, base=attacker.home)
    privacy = loaded.experiment.privacy
    assert privacy is not None
    central = loaded.experiment.model_copy(
        update={"privacy": privacy.with_choice("trust", name="central")}
    )
    asked = replace(loaded, experiment=central)
    for trust in ("local", "distributed"):
        policy = NodePolicy.model_construct(**{**NodePolicy().model_dump(), "trust": trust})
        with pytest.raises(PolicyRefusalError, match=f"trust is {trust}, and .* without noise"):
            check_experiment(policy, asked)
    check_experiment(NodePolicy(trust="central"), asked)


def test_a_node_answers_nobody_who_charges_in_its_place(attacker: Attacker) -> None:
    """Drawn in secret, clients charge nothing themselves: no budget of the node would hold."""
    changes = {
        "privacy": {
            **{"trust": "central", "unit": "client", "max_update_norm": 1.0},
            **{"noise_multiplier": 1.0, "delta": 1e-5, "on_exhausted": "refuse"},
        },
        "federation.participation": {"scheme": "poisson"},
        "federation.clients_per_round": 1,
    }
    attacker.policy(trust="central")
    assert "set federation.participation.scheme to uniform" in reason(attacker.asks(1, **changes))
    loaded = load_experiment(EXPERIMENT, changes, base=attacker.home)
    with pytest.raises(DeploymentError, match="scheme: poisson draws private clients in secret"):
        write_app(loaded, attacker.home / "poisson")


def test_distributed_trust_needs_known_helpers_a_known_plan_and_secret_noise() -> None:
    known: dict[str, Any] = {
        "helpers": ["0" * 64],
        "plan_digests": ["1" * 64],
        "require_secure_noise": True,
    }
    assert NodePolicy(trust="distributed", **known).trust == "distributed"
    for name in known:
        lacking = {key: value for key, value in known.items() if key != name}
        with pytest.raises(ValueError, match="trust: distributed needs helpers, plan_digests and"):
            NodePolicy(trust="distributed", **lacking)


@pytest.mark.parametrize("given", ["local", "distributed", "central"])
@pytest.mark.parametrize("needed", ["local", "distributed", "central"])
def test_a_budget_counts_what_holds_without_trust(given: Any, needed: Any) -> None:
    """Also for charges from before the policy trusted less."""
    claimed, own = PrivacyLedger().record(Gaussian(4.0)), PrivacyLedger().record(Gaussian(2.0))
    charge = DataCharge(
        experiment="e",
        seed=0,
        client=0,
        round=1,
        request="",
        adjacency="zero_out",
        ledger=claimed,
        trust=needed,
        against_server=own if needed == "distributed" else None,
    )
    content = charge.model_dump(mode="json", exclude_defaults=True)
    assert DataCharge(**content) == charge
    order = ["local", "distributed", "central"]
    (counted,) = charge.counted(given)
    if order.index(given) >= order.index(needed):
        assert counted == (Gaussian(4.0), 1)
    else:
        assert counted == ((Gaussian(2.0) if needed == "distributed" else NonPrivate()), 1)
