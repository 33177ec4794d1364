"""Pinned helpers: a key that the server puts in gets nothing, and a wrong file is found at once."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flwr.app import ConfigRecord, Message

from fedsim.cli import cli
from fedsim.experiment import load_experiment
from fedsim.federation.secure_setup import make_lasting_key, read_lasting_key
from fedsim.planning.validation import find_footprint
from fedsim.runs.runner import RunFailedError
from fedsim.secagg.errors import PublicKeyError
from fedsim.secagg.hpke import SealingKey
from fedsim.secagg.identity import IdentityKey


@pytest.fixture
def pinned(tmp_path: Path) -> dict[str, Any]:
    files = [tmp_path / f"helper-{number}.key" for number in (1, 2)]
    pins = [make_lasting_key(file).fingerprint for file in files]
    names = [str(file) for file in files]
    return {"aggregators": 3, "keys": {"helper_files": names, "helper_fingerprints": pins}}


def test_pinned_helpers_give_the_same_result(
    lab: Any, tmp_path: Path, pinned: dict[str, Any]
) -> None:
    result = lab.run(tmp_path / "r", pinned, privacy=lab.privacy)
    lab.same_result(result, lab.control({**lab.quantized}, privacy=lab.privacy))


@pytest.mark.parametrize("signed", [False, True], ids=["own identity", "genuine identity"])
def test_a_server_that_puts_in_a_key_of_its_own_gets_no_upload(
    lab: Any, tmp_path: Path, pinned: dict[str, Any], signed: bool
) -> None:
    """With its own lasting key, or beside the genuine one, whose word it cannot give."""
    own = IdentityKey.generate()

    def substitute(request: Message, reply: Message) -> None:
        if not request.metadata.message_type.endswith("secagg_hello"):
            return
        said = dict(reply.content.config_records["secagg"])
        said["public_key"] = SealingKey.generate().public
        if not signed:
            asked = request.content.config_records["secagg"]
            said["identity"] = own.public
            said["signature"] = own.sign(
                run_id=str(said["run_id"]),
                helper=int(said["helper"]),  # pyright: ignore[reportArgumentType]
                params=str(asked["params"]),
                public_key=said["public_key"],
            )
        reply.content["secagg"] = ConfigRecord(said)

    wire = lab.wire(twisted=substitute)
    with pytest.raises(RunFailedError, match="every client failed") as caught:
        lab.run(tmp_path / "r", pinned, wire)
    reasons = [one["reason"] for one in caught.value.result.rounds[0]["failed"]]
    assert len(reasons) == lab.clients
    what = (
        "is not signed by its pinned key"
        if signed
        else "is pinned; the server may have substituted"
    )
    assert all(reason.startswith("PublicKeyError: client") and what in reason for reason in reasons)
    for _, reply in wire.replies("train"):
        assert reply.has_error()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"helper_files": []}, "helper 1 has no lasting key, but keys.helper_fingerprints pins"),
        ({"swap": True}, "the lasting key of helper 1 has the fingerprint"),
        ({"helper_files": ["no.key", "none.key"]}, "no.key cannot be read: No such file"),
    ],
    ids=["no file", "swapped", "missing"],
)
def test_a_helper_without_its_key_ends_the_run_before_anybody_is_charged(
    lab: Any, tmp_path: Path, pinned: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    if change.pop("swap", False):
        change = {"helper_files": pinned["keys"]["helper_files"][::-1]}
    changed = {**pinned, "keys": {**pinned["keys"], **change}}
    with pytest.raises(RunFailedError, match=f"PublicKeyError: .*{said}") as caught:
        lab.run(tmp_path / "r", changed, privacy=lab.privacy)
    assert caught.value.result.privacy is not None
    assert {spend.rounds for spend in caught.value.result.privacy.clients} == {0}


def test_the_command_makes_a_key_once_and_prints_its_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "h.key"
    first, again = (CliRunner().invoke(cli, ["helper-key", str(path)]) for _ in range(2))
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert first.stdout == again.stdout
    assert first.stdout.strip() == read_lasting_key(path).fingerprint
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    refused = CliRunner().invoke(cli, ["helper-key", str(path)])
    assert refused.exit_code == 2
    assert f"chmod 600 {path}" in refused.stderr


def test_the_files_of_keys_are_among_those_that_an_experiment_reads(
    lab: Any, pinned: dict[str, Any]
) -> None:
    read = find_footprint(load_experiment(lab.experiment(pinned))).files
    assert {str(path) for path in read} == set(pinned["keys"]["helper_files"])


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.key"
    path.write_text("something else")
    path.chmod(0o600)
    with pytest.raises(PublicKeyError, match="is not a key of `fedsim helper-key`"):
        read_lasting_key(path)
