"""Rules for message fields: ranges of numbers, and lengths of bytes and texts.

The annotation of a field in `messages` holds its rule. A party that receives a message first checks
all fields against their rules. Then the party compares some values, such as the clients of a round,
with its own settings and state.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, get_args, get_origin, get_type_hints

from fedsim.core.limits import MAX_CLIENTS, MAX_ROUNDS
from fedsim.secagg.context import NONCE_BYTES
from fedsim.secagg.errors import WireError
from fedsim.secagg.hpke import ENVELOPE_OVERHEAD_BYTES
from fedsim.secagg.masks import SEED_BYTES
from fedsim.secagg.payload import MAX_LENGTH
from fedsim.secagg.settings import MAX_AGGREGATORS
from fedsim.secagg.shamir import SHARE_BYTES


@dataclass(frozen=True)
class Whole:
    """The rule that a message field is a whole number from `least` to `most`."""

    least: int
    most: int

    def allows(self, value: object) -> bool:
        """Whether a value is a whole number from `least` to `most`."""
        return type(value) is int and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Octets:
    """The rule that a message field is bytes, whose number is one of `lengths`."""

    lengths: tuple[int, ...]

    def allows(self, value: object) -> bool:
        """Whether a value is bytes with one of the allowed lengths."""
        return type(value) is bytes and len(value) in self.lengths

    def __str__(self) -> str:
        return f"{' or '.join(map(str, self.lengths))} bytes"


@dataclass(frozen=True)
class Text:
    """The rule that a message field is text of at most `most` ASCII characters."""

    most: int

    def allows(self, value: object) -> bool:
        """Whether a value is ASCII text of at most `most` characters."""
        return type(value) is str and len(value) <= self.most and value.isascii()

    def __str__(self) -> str:
        return f"at most {self.most} ASCII characters"


Rule = Whole | Octets | Text

ClientNumber = Annotated[int, Whole(0, MAX_CLIENTS - 1)]
ClientCount = Annotated[int, Whole(0, MAX_CLIENTS)]
HelperNumber = Annotated[int, Whole(1, MAX_AGGREGATORS - 1)]
RoundNumber = Annotated[int, Whole(1, MAX_ROUNDS)]
VectorLength = Annotated[int, Whole(1, MAX_LENGTH)]
Point = Annotated[int, Whole(1, MAX_CLIENTS)]
Name = Annotated[str, Text(256)]  # the name of a run, or a digest in hex
Nonce = Annotated[bytes, Octets((NONCE_BYTES,))]
Tag = Annotated[bytes, Octets((16,))]
TagOrNone = Annotated[bytes, Octets((0, 16))]
Identity = Annotated[bytes, Octets((0, 32))]
Signature = Annotated[bytes, Octets((0, 64))]
Commitment = Annotated[bytes, Octets((32,))]
Share = Annotated[bytes, Octets((SHARE_BYTES,))]
SealedSeed = Annotated[bytes, Octets((SEED_BYTES + ENVELOPE_OVERHEAD_BYTES,))]
SealedShares = Annotated[bytes, Octets((2 * SHARE_BYTES + ENVELOPE_OVERHEAD_BYTES,))]


def check_fields(message: object) -> None:
    """Check that every field of a message follows its rule.

    A list field must have at most `MAX_CLIENTS` entries, each of which follows the field's rule.

    Args:
        message: a dataclass of `messages`.

    Raises:
        WireError: a field breaks its rule; the error names the field, its value and the rule.
    """
    for name, (rule, is_list) in field_rules(type(message)).items():
        where, value = f"{type(message).__name__}.{name}", getattr(message, name)
        entries = value if is_list else (value,)
        if not isinstance(entries, tuple) or len(entries) > MAX_CLIENTS:
            raise WireError(f"{where} must be a list of at most {MAX_CLIENTS:,} entries")
        for entry in entries:
            if not rule.allows(entry):
                raise WireError(f"{where} must be {rule}, got {_shown(entry)}")


@lru_cache
def field_rules(kind: type) -> dict[str, tuple[Rule, bool]]:
    """Return the rules of a message class: pairs (rule, whether the field is a list), by field."""
    hints = get_type_hints(kind, include_extras=True)
    rules: dict[str, tuple[Rule, bool]] = {}
    for field in fields(kind):
        hint = hints[field.name]
        is_list = get_origin(hint) is tuple
        marks = getattr(get_args(hint)[0] if is_list else hint, "__metadata__", ())
        rules.update((field.name, (mark, is_list)) for mark in marks if isinstance(mark, Rule))
    return rules


def _shown(value: object) -> str:
    """Return a value as a short text; a long value is described by its size."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return repr(value[:40])
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:40]
