"""A client uploads nothing to a server that announces weaker settings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsim.clients.secure.additive_upload import SecureUploader
from fedsim.secagg.additive import seed_info
from fedsim.secagg.encoding import FixedPointEncoder
from fedsim.secagg.errors import (
    ContextMismatchError,
    InvalidWeightError,
    LayoutMismatchError,
    NonFiniteUpdateError,
    PublicKeyError,
)
from fedsim.secagg.hpke import SealingKey
from fedsim.secagg.identity import IdentityKey
from fedsim.secagg.masks import SeedExpander, derive_key
from fedsim.secagg.messages import RoundOffer, Upload
from fedsim.secagg.payload import PayloadCodec, TensorLayout
from fedsim.secagg.settings import SecureAggregationSettings

REFERENCE = {"w": np.zeros(4, np.float32)}
UPDATE = {"w": np.array([0.5, -0.25, 0.125, 1.0], np.float32)}
LAYOUT = TensorLayout.from_arrays(REFERENCE)
KEY = SealingKey.generate()


def uploader(**keys: Any) -> SecureUploader:
    settings = SecureAggregationSettings.model_validate(keys)
    encoder = FixedPointEncoder.from_settings(settings.encoding, num_clients=10, weighted=True)
    return SecureUploader(3, settings, PayloadCodec(encoder, LAYOUT))


def offer(settings: SecureAggregationSettings, **change: Any) -> RoundOffer:
    honest = RoundOffer(
        run_id="run",
        round_nonce=bytes(16),
        server_round=1,
        layout=LAYOUT.digest,
        params=settings.digest(),
        model="m",
        asked="a",
        plan="",
        helpers=(1,) if settings.helpers else (),
        helper_keys=(KEY.public,) if settings.helpers else (),
    )
    return replace(honest, **change)


def upload(one: SecureUploader, announced: RoundOffer, **change: Any) -> Upload:
    keys: dict[str, Any] = {
        "arrays": UPDATE,
        "reference": REFERENCE,
        "model_digest": "m",
        "weight": 7,
    }
    return one.upload(announced, **{**keys, **change})


def test_share_and_seed_hold_the_update() -> None:
    one = uploader()
    announced = offer(one.settings)
    sent = upload(one, announced)
    info = seed_info(announced, 3, 1)
    seed = KEY.open(sent.envelopes[0], info=info)
    total = sent.share.copy()
    SeedExpander().add_into(total, [derive_key(seed, info)])
    back = one.codec.decode(total, num_clients=1, reference=REFERENCE)
    np.testing.assert_array_equal(back.arrays["w"], UPDATE["w"])
    assert back.weight == 7


@pytest.mark.parametrize(
    "change",
    [
        {"helpers": (), "helper_keys": ()},  # would be an upload in clear
        {"helpers": (1, 2)},
        {"helpers": (1, 1), "helper_keys": (KEY.public, KEY.public)},
        {"params": "other"},
        {"model": "other"},
        {"layout": "other"},
        {"plan": "other"},
        {"round_nonce": b""},
    ],
)
def test_a_server_that_announces_something_else_gets_nothing(change: dict[str, Any]) -> None:
    one = uploader()
    with pytest.raises(ContextMismatchError, match="nothing was uploaded"):
        upload(one, offer(one.settings, **change))


def test_only_the_clients_own_settings_allow_an_upload_in_clear() -> None:
    one = uploader(protocol="quantized")
    sent = upload(one, offer(one.settings))
    back = one.codec.decode(sent.share, num_clients=1, reference=REFERENCE)
    np.testing.assert_array_equal(back.arrays["w"], UPDATE["w"])
    masked = uploader(protocol="secagg")
    with pytest.raises(ContextMismatchError, match="uploads under masks"):
        upload(masked, offer(masked.settings))


def test_a_key_that_is_not_the_pinned_one_is_refused() -> None:
    """Refused: another key, another signer, or a signature for another run, number or settings."""
    genuine, other = IdentityKey.generate(), IdentityKey.generate()
    one = uploader(keys={"helper_fingerprints": [genuine.fingerprint]})
    about = {"run_id": "run", "helper": 1, "params": one.settings.digest()}

    def announced(by: IdentityKey, sealing: bytes = KEY.public, **change: Any) -> RoundOffer:
        signature = by.sign(public_key=KEY.public, **{**about, **change})
        return offer(
            one.settings,
            helper_keys=(sealing,),
            helper_identities=(by.public,),
            helper_signatures=(signature,),
        )

    upload(one, announced(genuine))
    with pytest.raises(PublicKeyError, match=r"client 3: helper 1 shows the key .* is pinned"):
        upload(one, announced(other))
    for forged in (
        announced(genuine, sealing=SealingKey.generate().public),
        announced(genuine, run_id="an earlier run"),
        announced(genuine, helper=2),
        announced(genuine, params="weaker"),
        replace(announced(genuine), helper_signatures=(b"",)),
        replace(announced(other), helper_identities=(genuine.public,)),
    ):
        with pytest.raises(PublicKeyError, match="is not signed by its pinned key"):
            upload(one, forged)
    for change in ({"helper_signatures": ()}, {"helpers": (2,)}):
        with pytest.raises(ContextMismatchError, match="nothing was uploaded"):
            upload(one, replace(announced(genuine), **change))
    two = uploader()
    with pytest.raises(PublicKeyError, match="low order"):
        upload(two, offer(two.settings, helper_keys=(bytes(32),)))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"arrays": {"w": np.full(4, np.nan, np.float32)}}, NonFiniteUpdateError),
        ({"arrays": {"w": np.zeros(1, np.float32)}}, LayoutMismatchError),
        ({"weight": 0}, InvalidWeightError),
    ],
)
def test_bad_updates_do_not_leave(change: dict[str, Any], error: type[Exception]) -> None:
    one = uploader()
    with pytest.raises(error):
        upload(one, offer(one.settings), **change)


def test_the_trained_model_is_not_touched() -> None:
    one = uploader()
    before = UPDATE["w"].copy()
    upload(one, offer(one.settings))
    np.testing.assert_array_equal(UPDATE["w"], before)
