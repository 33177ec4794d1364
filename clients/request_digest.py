"""One digest of everything that an answer depends on, for the record of its charge.

Noise from the seed is keyed by (seed, client, round). Two different answers of one client in one
round would carry the same noise, and their difference would carry none. So a round is repeated only
under the digest that it was charged for.

The ledger is public, and a plain hash of private examples would let anybody test a guess of them.
The digest is therefore a keyed hash (BLAKE2b as a MAC), under a key from the seed and the client:

- Without the seed, the digest is a pseudorandom function's value and tells nothing of the examples.
- With the seed, seeded noise can be computed and subtracted: its ε holds against nobody who knows
  the seed, with or without this digest.
- Under secure noise the seed need not be secret, so the examples stay out of the digest. No answer
  is repeated there: each one is a release of its own and is charged.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from fedsim.core.streams import Purpose, stream_key
from fedsim.protocol.clip_bound import LearntBound

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class AnswerInputs:
    """Everything that a client's answer in a round depends on, beside its seed and its number.

    Attributes:
        block: planned members of the client's block, ascending.
        tile_rows: rows of each place in the block's tiles; None: as the client alone has.
        places: of a tile that any member may fill; None: each member has its own.
        model: digest of the request's global model.
        clip_norm: clipping bound of the request; None without.
        mechanism: text of the client's mechanism, with noise, clipping and sampling.
        conditions: digest of settings, plug-in sources, versions and device.
        data: digest of the client's examples; None where it must stay out of the record.
        sent: digests of the algorithm's arrays in the request; "" where there are none.
    """

    block: tuple[int, ...]
    tile_rows: int | None
    model: str
    clip_norm: LearntBound | None
    mechanism: str
    conditions: str
    data: bytes | None
    sent: str = ""
    places: int | None = None


def request_digest(inputs: AnswerInputs, *, seed: int, client: int) -> str:
    """Return the digest of a charge's record: 64 hexadecimal digits.

    Guarantee: equal digests of one client mean equal inputs, up to a collision of BLAKE2b-256.

    Args:
        inputs: everything that the answer depends on.
        seed: the experiment's seed.
        client: number of the client.
    """
    parts = (
        _text_of(inputs.block),
        repr(inputs.tile_rows),
        inputs.model,
        repr(inputs.clip_norm),
        inputs.mechanism,
        inputs.conditions,
        "" if inputs.data is None else inputs.data.hex(),
        *([inputs.sent] if inputs.sent else []),
        *([f"{inputs.places} places"] if inputs.places else []),
    )
    key = stream_key(seed, Purpose.REQUEST_DIGEST, client=client)
    text = "".join(f"{len(part)}:{part}" for part in parts).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=key).hexdigest()


@lru_cache(maxsize=8)
def _text_of(block: tuple[int, ...]) -> str:
    """Return a block as text, made once for its members."""
    return ",".join(map(str, block))
