"""A signature of fedsim is one that Flower's SuperNodes accept, and of no other bundle."""

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from flwr.supercore.fab import Fab

from fedsim.tools.deployment.signed_app import app_store, main

LOCKED = """\
-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAACmFlczI1Ni1jdHIAAAAGYmNyeXB0AAAAGAAAABCMT5NYwV
GGsv1X2zNckucgAAAAEAAAAAEAAAAzAAAAC3NzaC1lZDI1NTE5AAAAIDQTUiLJ7Al9wcH7
3WqAwH6RypSBEx2WF46QU5It1kyYAAAAkL+6dPKlV5dfBra8djG5PNSGD0gGrsrotwFMlZ
c3lnFympmsVnx/Hv5yLMdE7CBoajGbUkldFU7Y6SI9fEIG19foSSzO3ZO8wCLSUOFG0m1+
btRZoqm1RgzMr6cQEweqQC1OX1UiKd+aprgm1+F7g6X83wpfnZkd/4up286K03Pm2W1Y7f
FmR1aopk2DN2ELfw==
-----END OPENSSH PRIVATE KEY-----
"""  # an Ed25519 key with a passphrase
BUNDLE = "fedsim.digits-dp.1-0-0.0123abcd.fab"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundles" / BUNDLE
    path.parent.mkdir()
    path.write_bytes(b"the app")
    return path


def key_file(path: Path, key: object = None) -> tuple[Path, str]:
    key = Ed25519PrivateKey.generate() if key is None else key
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))  # pyright: ignore[reportAttributeAccessIssue]
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # pyright: ignore[reportAttributeAccessIssue]
    return path, public.decode()


@pytest.fixture
def address(bundle: Path) -> Iterator[str]:
    server = app_store(bundle.parent, 0)
    options = {"poll_interval": 0.01}  # else each shutdown waits for half a second
    Thread(target=server.serve_forever, kwargs=options, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetched(address: str, app: str, version: str | None = None) -> Fab:
    """Return an app as Flower's SuperLink gets it from a store."""
    asked = json.dumps({"app_id": app, "app_version": version, "flwr_version": "1.41.0"}).encode()
    with urlopen(Request(f"{address}/hub/fetch-fab", asked)) as answer:
        found = json.load(answer)
    with urlopen(found["fab_url"]) as answer:
        content = answer.read()
    signatures = {
        one["public_key_id"]: json.dumps({k: v for k, v in one.items() if k != "public_key_id"})
        for one in found["verifications"]
    }
    return Fab("", content, {**signatures, "valid_license": "Valid"})


def test_flowers_supernodes_accept_the_signature_and_no_other(
    bundle: Path, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flwr.supernode.start_client_internal import _verify_fab  # takes two seconds

    private, public = key_file(tmp_path / "reviewer")
    _, other = key_file(tmp_path / "other")
    assert not _verify_fab(fetched(address, "@fedsim/digits-dp"), {"fpk_reviewer": public})
    assert main(["sign", str(bundle), "--key", str(private), "--name", "fpk_reviewer"]) == 0
    assert f"{bundle}.signatures.json" in capsys.readouterr().out
    fab = fetched(address, "@fedsim/digits-dp", "1.0.0")
    assert fab.content == b"the app"
    assert _verify_fab(fab, {"fpk_reviewer": public})
    assert not _verify_fab(fab, {"fpk_reviewer": other})
    assert not _verify_fab(fab, {"fpk_other": public})
    assert not _verify_fab(Fab("", b"another", fab.verifications), {"fpk_reviewer": public})


def test_several_reviewers_sign_and_a_second_signature_replaces_the_first(
    bundle: Path, tmp_path: Path
) -> None:
    for name in ("a", "b", "a"):
        private, _ = key_file(tmp_path / name)
        main(["sign", str(bundle), "--key", str(private), "--name", f"fpk_{name}"])
    signatures = json.loads(Path(f"{bundle}.signatures.json").read_text())
    assert [one["public_key_id"] for one in signatures] == ["fpk_b", "fpk_a"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/hub/fetch-fab", {"app_id": "@fedsim/other"}),
        ("/hub/fetch-fab", {"app_id": "@fedsim/digits"}),
        ("/hub/fetch-fab", {"app_id": "@fedsim/digits-dp", "app_version": "2.0.0"}),
        ("/elsewhere", {"app_id": "@fedsim/digits-dp"}),
        ("/../reviewer", None),
        ("/hub/fetch-fab", []),
        ("/hub/fetch-fab", None),
    ],
)
def test_the_store_gives_bundles_and_nothing_else(address: str, path: str, body: object) -> None:
    sent = None if body is None else json.dumps(body).encode()
    with pytest.raises(HTTPError) as caught:
        urlopen(Request(f"{address}{path}", sent))
    assert caught.value.code == 404


def test_two_bundles_of_one_version_are_an_error_and_not_a_choice(
    bundle: Path, address: str
) -> None:
    bundle.with_name(BUNDLE.replace("0123abcd", "4567abcd")).write_bytes(b"another")
    with pytest.raises(HTTPError) as caught:
        fetched(address, "@fedsim/digits-dp", "1.0.0")
    assert "expected one bundle" in json.load(caught.value)["detail"]


def test_mistakes_are_one_line(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, _ = key_file(tmp_path / "node", generate_private_key(SECP384R1()))
    missing = tmp_path / "missing"
    right, _ = key_file(tmp_path / "right")
    locked = tmp_path / "locked"
    locked.write_text(LOCKED)
    signed = tmp_path / "signed.fab"
    signed.touch()
    Path(f"{signed}.signatures.json").write_text("[{")
    signing = [(bundle, missing), (missing, wrong), (bundle, wrong), (bundle, bundle)]
    signing += [(bundle, locked), (signed, right)]
    calls = [["sign", str(file), "--key", str(key), "--name", "x"] for file, key in signing]
    calls += [["serve", str(missing), "--port", "0"], ["serve", str(tmp_path), "--port", "65536"]]
    for arguments in calls:
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_ctrl_c_ends_the_store_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(store: ThreadingHTTPServer) -> None:
        store.server_close()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupt)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 130
