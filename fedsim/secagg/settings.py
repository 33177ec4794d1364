"""Settings of secure aggregation, from which all other parameters are computed.

Each protocol has a settings class for the options that only this protocol has, such as `threshold`
in `protocol: {name: secagg, threshold: 5}`.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_SECONDS
from fedsim.core.settings import Choice, Settings

MAX_AGGREGATORS = 16
_OF_EACH_MACHINE = {
    "on_abort": True,
    "protocol": {"combine_timeout_s": True, "combine_retries": True},
    "keys": {"helper_files": True, "client_files": True},
}

_Names = Annotated[tuple[str, ...], Field(strict=False)]  # a file has lists only
_Fingerprints = Annotated[
    tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...], Field(strict=False)
]
_NAME = Field(description="name of the protocol; see `secure_aggregation.protocol`")


class AdditiveSettings(Settings):
    """Settings of the protocol with additive shares, for a server and one or more helpers."""

    name: Literal["additive"] = _NAME
    combine_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_SECONDS,
        description="seconds to wait for a helper's share of the sum",
    )
    combine_retries: int = Field(
        default=2, ge=0, le=1000, description="number of retries after a helper's timeout"
    )


class SecAggSettings(Settings):
    """Settings of the protocol with pairwise masks between all clients, for a single server."""

    name: Literal["secagg"] = _NAME
    threshold: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | Literal["auto"] = Field(
        default="auto",
        description="number of shares that recover a secret; auto: more than two thirds",
    )


class SecAggPlusSettings(Settings):
    """Settings of the protocol with masks between neighbours in a graph, for a single server."""

    name: Literal["secagg_plus"] = _NAME
    corrupt_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of clients that may collude with the server"
    )
    dropout_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="fraction of clients that may drop out of a round"
    )
    security_bits: int = Field(
        default=40, ge=20, le=128, description="-log2 of the probability that privacy fails"
    )

    @model_validator(mode="after")
    def _some_clients_are_left(self) -> Self:
        if self.corrupt_fraction + self.dropout_fraction >= 1:
            raise ValueError(
                "corrupt_fraction + dropout_fraction must be below 1, got "
                f"{self.corrupt_fraction} + {self.dropout_fraction}; lower one of them"
            )
        return self


class QuantizedSettings(Settings):
    """Settings of a baseline with the same fixed-point numbers, but without cryptography."""

    name: Literal["quantized"] = _NAME


ProtocolSettings = AdditiveSettings | SecAggSettings | SecAggPlusSettings | QuantizedSettings


class EncodingSettings(Settings):
    """Settings of the fixed-point encoding of updates as ring integers."""

    ring_bits: Literal[32, 64] = Field(
        default=64, description="bits of a ring element; 32 halves the upload and the precision"
    )
    frac_bits: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="fraction bits that are kept of every value; auto: as many as fit, at most 32",
    )
    value_bound: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description="largest |value| of an uploaded coordinate; auto: from learning rate, clipping "
        "norm and noise, so that no planned upload is above it; 8 where nothing bounds an upload",
    )
    range_policy: Literal["error", "clip"] = Field(
        default="error",
        description="for values above value_bound: error leaves the client out, clip clips and "
        "counts them",
    )
    payload: Literal["delta", "parameters"] = Field(
        default="delta",
        description="delta: clients upload the change of the model; parameters: the model",
    )
    max_weight: Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] | Literal["auto"] = Field(
        default="auto",
        description="largest weight of a client; auto: 1 when uniform, else 100000",
    )
    max_clients: Annotated[int, Field(ge=1, le=MAX_CLIENTS)] | Literal["auto"] = Field(
        default="auto",
        description="largest number of clients in a sum; auto: the clients of a round",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="nearest: ties to even; stochastic: unbiased, with twice the error bound",
    )
    guard_bits: int = Field(
        default=8,
        ge=0,
        le=32,
        description="number of unused top bits, which reveal mismatched shares",
    )


class LastingKeySettings(Settings):
    """Settings of the lasting (long-term) keys by which helpers and clients are recognised."""

    helper_fingerprints: _Fingerprints = Field(
        default=(),
        description="fingerprints of the helpers' lasting keys (`fedsim helper-key`), in the order "
        "of the helpers; clients refuse other keys",
    )
    helper_files: _Names = Field(
        default=(),
        description="files of the helpers' lasting keys in a simulation; in a deployment each "
        "SuperNode names the file of its key",
    )
    client_fingerprints: _Fingerprints = Field(
        default=(),
        description="fingerprints of the clients' lasting keys (`fedsim client-key`), in the order "
        "of the clients; helpers refuse uploads with other keys",
    )
    client_files: _Names = Field(
        default=(),
        description="files of the clients' lasting keys in a simulation; in a deployment each "
        "SuperNode names the file of its key",
    )

    @field_validator("*")
    @classmethod
    def _all_different(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(given)) != len(given):
            raise ValueError(
                f"names {len(given)} keys, {len(set(given))} of them different; name a different "
                "one for each party, or none"
            )
        return given


class SecureAggregationSettings(Settings):
    """Settings `secure_aggregation:` of an experiment file; without them, aggregation is plain."""

    protocol: Annotated[ProtocolSettings, Choice()] = Field(
        default=AdditiveSettings(name="additive"),
        description="additive: shares for two or more aggregators; secagg, secagg_plus: pairwise "
        "masks for a single server; quantized: the same numbers without cryptography (baseline); a "
        "mapping sets the keys of the protocol",
    )
    aggregators: int = Field(
        default=2,
        ge=2,
        le=MAX_AGGREGATORS,
        description="additive: parties that each hold a share, the server among them",
    )
    min_clients: int = Field(
        default=3,
        ge=2,
        le=MAX_CLIENTS,
        description="fewest clients whose sum is opened; helpers, and clients of secagg, enforce "
        "the value of their experiment file",
    )
    encoding: EncodingSettings = Field(
        default=EncodingSettings(), description="how updates become integers of a ring"
    )
    prg: Literal["aes256_ctr", "chacha20"] = Field(
        default="aes256_ctr", description="keystream that expands a seed to a mask"
    )
    metrics: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={},
        description="names and bounds of means over a client's examples that are clipped to "
        "[-bound, bound] and averaged inside the protocol",
    )
    on_abort: Literal["raise", "skip_round"] = Field(
        default="raise",
        description="after a round that cannot be opened: end the run, or keep the old model",
    )
    keys: LastingKeySettings = Field(
        default=LastingKeySettings(),
        description="additive: lasting keys of helpers and clients, which the other parties pin",
    )

    @field_validator("aggregators", "keys")
    @classmethod
    def _parties_of_additive(cls, given: Any, info: ValidationInfo) -> Any:
        protocol, name = info.data.get("protocol"), str(info.field_name)
        if protocol is None or isinstance(protocol, AdditiveSettings):
            return given
        if given != cls.model_fields[name].default:
            raise ValueError(
                f"protocol: {protocol.name} has a single server, without helpers and lasting keys; "
                f"remove {name}, or use protocol: additive"
            )
        return given

    @model_validator(mode="after")
    def _numbers_of_parties(self) -> Self:
        largest = self.encoding.max_clients
        if largest != "auto" and largest < self.min_clients:
            raise ValueError(
                f"encoding.max_clients is {largest}, below min_clients {self.min_clients}: no "
                "round could be opened; raise encoding.max_clients or lower min_clients"
            )
        for name in ("helper_fingerprints", "helper_files"):
            given = getattr(self.keys, name)
            if len(given) not in (0, self.helpers):
                raise ValueError(
                    f"keys.{name} names {len(given)} keys, but {self.aggregators} aggregators have "
                    f"{self.helpers} helpers; name one for each, or none"
                )
        return self

    @property
    def helpers(self) -> int:
        """Number of helper nodes that the protocol needs."""
        return self.aggregators - 1 if isinstance(self.protocol, AdditiveSettings) else 0

    def plan(self) -> dict[str, Any]:
        """Return the settings as JSON values, except those that each machine sets for itself."""
        return self.model_dump(mode="json", exclude=_OF_EACH_MACHINE)

    def digest(self) -> str:
        """Return the SHA-256, in hex, of the settings on which all parties must agree."""
        shared = self.plan()
        del shared["keys"]["helper_fingerprints"]  # each party chooses which keys it pins
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
