"""Upload of a client under additive secret sharing: a share of the update, and encrypted seeds.

The server gets the share. Each helper (a party that also sums shares) gets a random seed, encrypted
with the helper's key. The seed expands to the helper's share. The update is encoded last, after
differential privacy and injected faults.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsim.secagg.additive import leader_share_info, seed_info, split
from fedsim.secagg.context import NONCE_BYTES
from fedsim.secagg.digests import vector_tag
from fedsim.secagg.encoding import Ring
from fedsim.secagg.errors import ContextMismatchError
from fedsim.secagg.fields import check_fields
from fedsim.secagg.hpke import check_distinct, load_public_key, seal
from fedsim.secagg.identity import IdentityKey, verify_helper_key
from fedsim.secagg.masks import SeedExpander
from fedsim.secagg.messages import HelloReply, RoundOffer, Upload
from fedsim.secagg.payload import NamedArrays, PayloadCodec
from fedsim.secagg.settings import SecureAggregationSettings


@dataclass(frozen=True)
class SecureUploader:
    """Encoder of one client's trained arrays into an upload of secret shares.

    Guarantee: nothing is encoded if settings, model or layout in the server's offer (the parameters
    of the round) differ from the client's own. No readable update is uploaded unless the client's
    settings say `quantized`. The server's share is uniformly random for every update, if at least
    one helper keeps its seed secret.

    Attributes:
        client: number of this client.
        settings: secure aggregation settings of the client; a server cannot weaken them.
        codec: codec from arrays to ring elements (integers modulo a power of 2).
        plan: digest of the privacy plan, which the client computes itself; "" without privacy.
        identity: the client's long-term signing key; None without one.
    """

    client: int
    settings: SecureAggregationSettings
    codec: PayloadCodec
    plan: str = ""
    identity: IdentityKey | None = None

    def encode_payload(
        self,
        offer: RoundOffer,
        *,
        arrays: NamedArrays,
        reference: NamedArrays,
        model_digest: str,
        weight: int,
        metrics: Mapping[str, float] | None = None,
        rng: np.random.Generator | None = None,
    ) -> Ring:
        """Return the encoded update, not yet shared or masked: integers modulo a power of 2 (d,).

        Args:
            offer: the round's parameters, as the server announced them.
            arrays: the trained model, tensors by name.
            reference: the model in the request, tensors by name.
            model_digest: digest of `reference`, which the client computed itself.
            weight: aggregation weight of the client, a whole number from 1 to the largest weight.
            metrics: each declared metric's mean over the client's examples, by name.
            rng: random generator for stochastic rounding.

        Raises:
            WireError: a field of the offer is malformed.
            PublicKeyError: a helper's key is unusable, repeated, or not as in the settings.
            ContextMismatchError, LayoutMismatchError: server and client have different settings,
                models, layouts, privacy plans or helpers.
            NonFiniteUpdateError, ValueOutOfRangeError, InvalidWeightError: the update or the weight
                cannot be encoded.
        """
        self._check_context(offer, model_digest)
        self._check_helpers(offer)
        return self.codec.encode(
            arrays,
            reference=reference if self._sends_changes else None,
            weight=weight,
            metrics=metrics,
            rng=rng,
            client=self.client,
        )

    def upload(
        self,
        offer: RoundOffer,
        *,
        arrays: NamedArrays,
        reference: NamedArrays,
        model_digest: str,
        weight: int,
        metrics: Mapping[str, float] | None = None,
        rng: np.random.Generator | None = None,
    ) -> Upload:
        """Return the upload of this round: a share of the update and encrypted seeds.

        Args:
            offer: the round's parameters, as the server announced them.
            arrays: the trained model, tensors by name.
            reference: the model in the request, tensors by name.
            model_digest: digest of `reference`, which the client computed itself.
            weight: aggregation weight of the client, a whole number from 1 to the largest weight.
            metrics: each declared metric's mean over the client's examples, by name.
            rng: random generator for stochastic rounding.

        Raises:
            ContextMismatchError: the client's settings name a protocol with pairwise masks.
            SecureAggregationError: the update cannot be encoded; `encode_payload` lists the errors.
        """
        if self.settings.protocol.name not in ("additive", "quantized"):
            raise ContextMismatchError(
                f"protocol {self.settings.protocol.name} uploads under masks, not in shares; "
                "use fedsim.clients.secure.masked_upload",
                client=self.client,
            )
        vector = self.encode_payload(
            offer,
            arrays=arrays,
            reference=reference,
            model_digest=model_digest,
            weight=weight,
            metrics=metrics,
            rng=rng,
        )
        infos = [seed_info(offer, self.client, helper) for helper in offer.helpers]
        seeds = split(vector, infos, SeedExpander(self.settings.prg))
        sealed = zip(seeds, offer.helper_keys, infos, strict=True)
        envelopes = tuple(seal(seed, key, info=info) for seed, key, info in sealed)
        identity, signatures = self._signed(envelopes, infos)
        return Upload(
            client=self.client,
            round_nonce=offer.round_nonce,
            model=offer.model,
            share=vector,
            tag=vector_tag(vector, leader_share_info(offer, self.client)),
            envelopes=envelopes,
            identity=identity,
            signatures=signatures,
        )

    def _signed(
        self, envelopes: tuple[bytes, ...], infos: list[bytes]
    ) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the client's lasting public key and its signatures; b"" and () without a key."""
        key = self.identity
        if key is None:
            return b"", ()
        pairs = zip(envelopes, infos, strict=True)
        return key.public, tuple(key.sign_envelope(sealed, info=info) for sealed, info in pairs)

    @property
    def _sends_changes(self) -> bool:
        return self.settings.encoding.payload == "delta" and not self.codec.is_integers

    def _check_context(self, offer: RoundOffer, model_digest: str) -> None:
        comparisons = (
            ("settings", offer.params, self.settings.digest()),
            ("model", offer.model, model_digest),
            ("layout", offer.layout, self.codec.layout.digest),
            ("privacy plan", offer.plan, self.plan),
            ("nonce length", len(offer.round_nonce), NONCE_BYTES),
        )
        for name, announced, expected in comparisons:
            if announced != expected:
                raise ContextMismatchError(
                    f"the server announced {name} {announced}, the client has {expected}; "
                    "nothing was uploaded. Run the same experiment on both sides",
                    round_number=offer.server_round,
                    client=self.client,
                )
        check_fields(offer)

    def _check_helpers(self, offer: RoundOffer) -> None:
        """Check that the offer has exactly the helpers of the client's settings."""
        count, pins = self.settings.helpers, self.settings.keys.helper_fingerprints
        signed = {len(offer.helper_identities), len(offer.helper_signatures)}
        complete = len(offer.helper_keys) == count and signed <= ({count} if pins else {0, count})
        if offer.helpers != tuple(range(1, count + 1)) or not complete:
            raise ContextMismatchError(
                f"the server announced helpers {list(offer.helpers)} with "
                f"{len(offer.helper_keys)} keys and {len(offer.helper_signatures)} signatures, "
                f"but the settings have {count} helpers, numbered from 1; nothing was uploaded",
                round_number=offer.server_round,
                client=self.client,
            )
        for key in offer.helper_keys:
            load_public_key(key)
        check_distinct(offer.helper_keys)
        for place, pin in enumerate(pins):
            hello = HelloReply(
                run_id=offer.run_id,
                helper=offer.helpers[place],
                public_key=offer.helper_keys[place],
                identity=offer.helper_identities[place],
                signature=offer.helper_signatures[place],
            )
            verify_helper_key(hello, pin, params=self.settings.digest(), client=self.client)
