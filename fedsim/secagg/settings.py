"""Settings of secure aggregation; all other parameters are computed from them."""

import hashlib
import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_SECONDS
from fedsim.core.settings import Settings

RUNTIME_KEYS = {
    "combine_timeout_s",
    "combine_retries",
    "on_abort",
    "helper_key_fingerprints",
    "helper_key_files",
    "client_key_files",
}
MAX_AGGREGATORS = 16
_ADDITIVE_KEYS = {
    "aggregators": 2,
    "helper_key_fingerprints": (),
    "helper_key_files": (),
    "client_key_fingerprints": (),
    "client_key_files": (),
    "combine_timeout_s": 60.0,
    "combine_retries": 2,
}
_PLUS_KEYS = {"corrupt_fraction": 0.1, "dropout_fraction": 0.1, "security_bits": 40}


class SecureAggregationSettings(Settings):
    """`secure_aggregation:` in an experiment file; without the section, aggregation is plain."""

    protocol: Literal["additive", "quantized", "secagg", "secagg_plus"] = Field(
        default="additive",
        description="additive: shares for two or more aggregators; secagg, secagg_plus: pairwise "
        "masks for a single server; quantized: the same numbers without cryptography (control)",
    )
    aggregators: int = Field(
        default=2,
        ge=2,
        le=MAX_AGGREGATORS,
        description="parties that each hold a share, the server among them",
    )
    ring_bits: Literal[32, 64] = Field(
        default=64, description="bits of a ring element; 32 halves the upload and the precision"
    )
    frac_bits: Annotated[int, Field(le=64)] | Literal["auto"] = Field(
        default="auto",
        description="binary places kept of every value; auto: as many as fit, at most 32",
    )
    value_bound: float = Field(
        default=8.0, gt=0, description="largest |value| of an uploaded coordinate"
    )
    range_policy: Literal["error", "clip"] = Field(
        default="error",
        description="values above the bound: error leaves the client out; clip clips and counts",
    )
    payload: Literal["delta", "parameters"] = Field(
        default="delta", description="upload the change of the model, or the model"
    )
    max_weight: Annotated[int, Field(le=MAX_EXAMPLES)] | Literal["auto"] = Field(
        default="auto",
        description="largest weight of a client; auto: 1 when uniform, else 100000",
    )
    max_clients: Annotated[int, Field(le=MAX_CLIENTS)] | Literal["auto"] = Field(
        default="auto",
        description="largest number of clients in a sum; auto: the clients of a round",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="nearest-even, or unbiased at twice the error bound",
    )
    guard_bits: int = Field(
        default=8, ge=0, le=32, description="unused top bits; they reveal mismatched shares"
    )
    min_clients: int = Field(
        default=3,
        ge=2,
        le=MAX_CLIENTS,
        description="fewest clients whose sum is opened; helpers, and clients of secagg, enforce "
        "their own",
    )
    metrics: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={},
        description="names and bounds of means over a client's examples that are clipped to "
        "[-bound, bound] and averaged inside the protocol",
    )
    prg: Literal["aes256_ctr", "chacha20"] = Field(
        default="aes256_ctr", description="keystream that expands a seed to a mask"
    )
    combine_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_SECONDS,
        description="seconds to wait for a helper's share of the sum",
    )
    combine_retries: int = Field(
        default=2, ge=0, le=1000, description="number of retries after a helper's timeout"
    )
    on_abort: Literal["raise", "skip_round"] = Field(
        default="raise",
        description="after a round that cannot be opened: end the run, or keep the old model",
    )
    helper_key_fingerprints: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        default=(),
        strict=False,  # a file has lists only
        description="fingerprints of the helpers' lasting keys (`fedsim helper-key`), in the order "
        "of the helpers; clients refuse any other key",
    )
    helper_key_files: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="files of those keys, for helpers of a simulation; a SuperNode names its own",
    )
    client_key_fingerprints: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        default=(),
        strict=False,
        description="fingerprints of the clients' lasting keys (`fedsim client-key`), in the order "
        "of the clients; helpers count no other uploads",
    )
    client_key_files: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="files of those keys, for clients of a simulation; a SuperNode names its own",
    )
    threshold: Annotated[int, Field(le=MAX_CLIENTS)] | Literal["auto"] = Field(
        default="auto",
        description="secagg: number of shares that recover a secret; auto: more than two thirds",
    )
    corrupt_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="secagg_plus: clients that may collude with the server"
    )
    dropout_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="secagg_plus: clients that may drop out of a round"
    )
    security_bits: int = Field(
        default=40,
        ge=20,
        le=128,
        description="secagg_plus: -log2 of the probability that privacy fails",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse keys that the protocol does not read, and impossible numbers."""
        if self.protocol != "additive":
            self._reject_unread(_ADDITIVE_KEYS, "protocol: additive")
        if self.protocol != "secagg_plus":
            self._reject_unread(_PLUS_KEYS, "protocol: secagg_plus")
        if self.protocol != "secagg":
            self._reject_unread({"threshold": "auto"}, "protocol: secagg (secagg_plus computes it)")
        if self.corrupt_fraction + self.dropout_fraction >= 1:
            raise ValueError(
                "corrupt_fraction + dropout_fraction must be below 1, got "
                f"{self.corrupt_fraction} + {self.dropout_fraction}; lower one of them"
            )
        for name in ("frac_bits", "max_weight", "max_clients", "threshold"):
            value = getattr(self, name)
            least = 0 if name == "frac_bits" else 1
            if value != "auto" and value < least:
                raise ValueError(f"{name} must be auto or >= {least}, got {value}; use auto")
        if self.max_clients != "auto" and self.max_clients < self.min_clients:
            raise ValueError(
                f"max_clients is {self.max_clients}, below min_clients {self.min_clients}: no "
                "round could be opened; raise max_clients or lower min_clients"
            )
        for name in ("helper_key_fingerprints", "helper_key_files"):
            given = getattr(self, name)
            if len(given) not in (0, self.aggregators - 1) or len(set(given)) != len(given):
                raise ValueError(
                    f"{name} names {len(given)} keys, {len(set(given))} of them different, but "
                    f"{self.aggregators} aggregators have {self.aggregators - 1} helpers; name a "
                    "different one for each, or none"
                )
        for name in ("client_key_fingerprints", "client_key_files"):
            given = getattr(self, name)
            if len(set(given)) != len(given):
                raise ValueError(
                    f"{name} names {len(given)} keys, {len(set(given))} of them different; name a "
                    "different one for each client, or none"
                )
        return self

    @property
    def helpers(self) -> int:
        """Number of helper nodes that the protocol needs."""
        return self.aggregators - 1 if self.protocol == "additive" else 0

    def _reject_unread(self, keys: dict[str, object], reader: str) -> None:
        for name, default in keys.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but protocol: {self.protocol} does not "
                    f"read it; remove it, or use {reader}"
                )

    def digest(self) -> str:
        """Return the SHA-256 of the settings on which the parties must agree, in hex."""
        shared = self.model_dump(mode="json", exclude=RUNTIME_KEYS)
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()
