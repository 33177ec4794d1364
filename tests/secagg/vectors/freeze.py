"""Writes the frozen vectors anew, for a new version of the wire format or new settings.

    python tests/secagg/vectors/freeze.py

Messages keep their values; a field that is new must be put into `good.json` by hand first. The
recorded round is made from fixed payloads and fresh envelopes. Vectors of a released version are
never changed.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fedsim.secagg.additive import leader_share_info, seed_info, split
from fedsim.secagg.context import RoundContext, set_digest
from fedsim.secagg.digests import vector_tag
from fedsim.secagg.hpke import SealingKey, seal
from fedsim.secagg.masks import SeedExpander
from fedsim.secagg.messages import CombineRequest, RoundOffer
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.secagg.wire import WIRE_VERSION, to_record
from fedsim.server.secure.helper import Helper, HelperState

HERE = Path(__file__).parent
ASKED = (2, 5, 6, 8)
PAYLOADS = {2: [5, -5, 50, 7, 1], 5: [4, -4, 40, 6, 1], 8: [6, -6, 60, 8, 1]}


def as_json(value: Any) -> Any:
    """Return bytes and arrays as the objects that the tests read."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, np.ndarray):
        return {"ring": value.tolist(), "bits": 8 * value.dtype.itemsize}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    return value


def recorded_round() -> dict[str, Any]:
    """Return one round of three clients and one helper."""
    settings = SecureAggregationSettings()
    key = SealingKey.from_bytes(bytes(range(32)))
    context = RoundContext(
        run_id="run",
        round_nonce=bytes(range(16)),
        server_round=4,
        layout="a" * 64,
        params=settings.digest(),
        model="b" * 64,
        asked=set_digest(ASKED),
        plan="c" * 64,
    )
    offer = RoundOffer(
        **vars(context),
        helpers=(1,),
        helper_keys=(key.public,),
        helper_identities=(b"",),
        helper_signatures=(b"",),
    )
    shares, envelopes = [], []
    for client, payload in PAYLOADS.items():
        share = np.array(payload, np.int64).view(np.uint64)
        info = seed_info(context, client, 1)
        (seed,) = split(share, [info], SeedExpander(settings.prg))
        shares.append(share)
        envelopes.append(seal(seed, key.public, info=info))
    request = CombineRequest(
        run_id=context.run_id,
        round_nonce=context.round_nonce,
        server_round=context.server_round,
        layout=context.layout,
        model=context.model,
        asked=ASKED,
        plan=context.plan,
        length=5,
        release=True,
        clients=tuple(PAYLOADS),
        envelopes=tuple(envelopes),
    )
    state = HelperState(
        run_id="run",
        private_key=key.to_bytes(),
        min_clients=3,
        answered=3,
        question="earlier",
        past=("before",),
    )
    reply = Helper(helper=1, settings=settings, state=state).combine(request)
    return {
        "settings": settings.model_dump(mode="json"),
        "offer": to_record(offer).config,
        "request": to_record(request).config,
        "helper": to_record(state).config,
        "shares": shares,
        "tags": [
            vector_tag(share, leader_share_info(context, client))
            for client, share in zip(PAYLOADS, shares, strict=True)
        ],
        "total": reply.total,
        "tag": reply.tag,
        "sum": sum(shares, reply.total),
        "masked_by_seed": {prg: masked_by_seed(prg, context) for prg in ("aes256_ctr", "chacha20")},
    }


def masked_by_seed(prg: Any, context: RoundContext) -> np.ndarray:
    """Return a vector under the mask of a known seed."""
    vector = np.arange(5, dtype=np.uint64)
    with patch("fedsim.secagg.additive.new_seed", lambda: bytes(range(32))):
        split(vector, [seed_info(context, 2, 1)], SeedExpander(prg))
    return vector


def main() -> None:
    """Write both files."""
    params = SecureAggregationSettings().digest()
    for name in ("good.json", "bad.json"):
        path = HERE / name
        content = json.loads(path.read_text())
        for case in content["messages"]:
            config = case["config"]
            if "version" in config:
                config["version"] = WIRE_VERSION + (case.get("why") == "another version")
            if "params" in config:
                config["params"] = params
        if "round" in content:
            content["round"] = as_json(recorded_round())
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
