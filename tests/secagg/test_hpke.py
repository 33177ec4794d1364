"""Envelopes: equal to a second implementation of RFC 9180, and closed in other contexts."""

import hashlib
import hmac
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsim.cli import cli, main
from fedsim.secagg import hpke
from fedsim.secagg.errors import EnvelopeError, PublicKeyError
from fedsim.secagg.hpke import (
    ENVELOPE_OVERHEAD_BYTES,
    HpkeMissingError,
    SealingKey,
    agree,
    check_distinct,
    check_hpke,
    load_public_key,
    seal,
)

# RFC 9180, appendix A.1.1: base mode, X25519, HKDF-SHA256, AES-128-GCM.
INFO = bytes.fromhex("4f6465206f6e2061204772656369616e2055726e")
EPHEMERAL = bytes.fromhex("52c4a758a802cd8b936eceea314432798d5baf2d7e9235dc084ab1b9cfa2f736")
RECEIVER = bytes.fromhex("4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8")
ENC = "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"
PLAIN = bytes.fromhex("4265617574792069732074727574682c20747275746820626561757479")
SEALED = (
    "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a96d8770ac83d07bea87e13c512a"
)
AES_128, AES_256 = (1, 16), (2, 32)


def _extract(salt: bytes, label: bytes, secret: bytes, suite: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + secret, hashlib.sha256)


def _expand(key: bytes, label: bytes, info: bytes, length: int, suite: bytes) -> bytes:
    labeled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(key, labeled + b"\x01", hashlib.sha256)[:length]


def rfc_seal(
    plain: bytes, ephemeral: bytes, public: bytes, info: bytes, aad: bytes, aead: tuple[int, int]
) -> bytes:
    """The RFC's text as code: sections 4.1, 5.1 and 5.2 in base mode."""
    private = X25519PrivateKey.from_private_bytes(ephemeral)
    enc = private.public_key().public_bytes_raw()
    kem = b"KEM" + (0x20).to_bytes(2, "big")
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    shared = _expand(
        _extract(b"", b"eae_prk", secret, kem), b"shared_secret", enc + public, 32, kem
    )
    number, key_bytes = aead
    suite = b"HPKE" + b"".join(part.to_bytes(2, "big") for part in (0x20, 1, number))
    context = b"\x00" + _extract(b"", b"psk_id_hash", b"", suite)
    context += _extract(b"", b"info_hash", info, suite)
    root = _extract(shared, b"secret", b"", suite)
    key = _expand(root, b"key", context, key_bytes, suite)
    nonce = _expand(root, b"base_nonce", context, 12, suite)
    return enc + AESGCM(key).encrypt(nonce, plain, aad)


def test_the_rfcs_own_vector() -> None:
    public = SealingKey.from_bytes(RECEIVER).public
    sealed = rfc_seal(PLAIN, EPHEMERAL, public, INFO, b"Count-0", AES_128)
    assert sealed.hex() == ENC + SEALED


def test_our_key_opens_what_the_rfc_seals() -> None:
    key = SealingKey.from_bytes(RECEIVER)
    sealed = rfc_seal(PLAIN, EPHEMERAL, key.public, INFO, b"", AES_256)
    assert key.open(sealed, info=INFO) == PLAIN


def test_a_sealed_seed_has_80_bytes_and_is_never_the_same_twice() -> None:
    key = SealingKey.generate()
    one, other = (seal(bytes(32), key.public, info=b"i") for _ in range(2))
    assert len(one) == 32 + ENVELOPE_OVERHEAD_BYTES == 80
    assert one != other
    assert key.open(one, info=b"i") == key.open(other, info=b"i") == bytes(32)


def test_no_flipped_bit_opens() -> None:
    key = SealingKey.generate()
    envelope = seal(bytes(32), key.public, info=b"i")
    opened = []
    for bit in range(0, 8 * len(envelope), 3):
        bad = bytearray(envelope)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            opened.append((bit, key.open(bytes(bad), info=b"i")))
        except EnvelopeError:
            continue
    assert not opened


@pytest.mark.parametrize("length", [0, 1, 31, 32, 79])
def test_a_truncated_envelope_does_not_open(length: int) -> None:
    key = SealingKey.generate()
    envelope = seal(bytes(32), key.public, info=b"i")[:length]
    with pytest.raises(EnvelopeError, match="client 4"):
        key.open(envelope, info=b"i", client=4)


def test_nothing_opens_for_another_context_or_key() -> None:
    key = SealingKey.generate()
    envelope = seal(bytes(32), key.public, info=b"round 1")
    with pytest.raises(EnvelopeError):
        key.open(envelope, info=b"round 2")
    with pytest.raises(EnvelopeError):
        SealingKey.generate().open(envelope, info=b"round 1")


LOW_ORDER = [
    bytes(32),
    bytes([1]) + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]


@pytest.mark.parametrize("key", [*LOW_ORDER, b"", bytes(31)])
def test_keys_of_low_order_are_refused_everywhere(key: bytes) -> None:
    with pytest.raises(PublicKeyError, match="not be of low order"):
        load_public_key(key)
    with pytest.raises(PublicKeyError):
        agree(RECEIVER, key)
    with pytest.raises(PublicKeyError):
        seal(bytes(32), key, info=b"")


def test_repeated_keys_are_refused() -> None:
    with pytest.raises(PublicKeyError, match="occurs twice"):
        check_distinct([bytes(32), bytes(32)])


def test_both_sides_agree_on_a_secret() -> None:
    one, other = SealingKey.generate(), SealingKey.generate()
    secret = agree(one.to_bytes(), other.public)
    assert secret == agree(other.to_bytes(), one.public)
    assert secret != agree(other.to_bytes(), SealingKey.generate().public)


def test_without_hpke_plain_runs_go_on_and_secure_ones_say_in_one_line_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulates cryptography 46, which has no module `hpke`."""
    monkeypatch.setattr(hpke, "_SUITE", None)
    with pytest.raises(HpkeMissingError):
        check_hpke()
    file = tmp_path / "e.yaml"
    text = """\
name: e
data: {dataset: digits, partition: {scheme: iid, num_clients: 3}}
model: {name: logistic}
federation: {rounds: 1}
local: {steps: 1, batch_size: 8}
privacy: null
"""
    file.write_text(text)
    plain = CliRunner().invoke(cli, ["run", str(file), "--out", str(tmp_path / "plain")])
    assert plain.exit_code == 0
    file.write_text(text + "secure_aggregation: {}\n")
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", str(file), "--out", str(tmp_path / "s")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'flwr>=1.40' 'cryptography>=47'")
    assert not (tmp_path / "s").exists()


def test_the_lower_bounds_of_the_package_are_versions_that_have_hpke() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    needs = tomllib.loads(project.read_text())["project"]["dependencies"]
    bounds = dict(_bound(need) for need in needs)
    assert bounds["cryptography"] >= (47,)
    assert bounds["flwr"] >= (1, 40)  # the first that allows cryptography 47


def _bound(need: str) -> tuple[str, tuple[int, ...]]:
    name, _, low = need.partition(">=")
    return name, tuple(int(part) for part in low.split(",")[0].split("."))
