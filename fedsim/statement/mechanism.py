"""The mechanism of one step, its sampling and its accounting."""

from collections.abc import Mapping
from typing import Any

from fedsim.clients.dp_sgd.sampling_schemes import SAMPLING_SCHEMES
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Sentence, count_text, range_text

_CLIPPINGS = {
    "flat": "clipped to L2 norm C as a whole",
    "per_layer": "clipped layer by layer, to bounds whose squares add up to C²",
    "automatic": "normalised to L2 norm below C",
    "adaptive": "clipped to L2 norm C as a whole",
}
_METHODS = {
    "pld": "privacy loss distributions, discretised by connect-the-dots so that the result is an "
    "upper bound (Doroshenko et al. 2022)",
    "rdp": "Rényi differential privacy (Mironov 2017) with the conversion of Canonne, Kamath and "
    "Steinke 2020, an upper bound, usually about 10% above the exact value",
    "moments": "the moments accountant of Abadi et al. 2016, a loose upper bound",
}

_ADAPTATION = (
    " A count of the lot's examples with norm below C, with Gaussian noise, moves C towards a "
    "quantile of the norms for the next step. Sum and count are accounted for as one Gaussian "
    "release with noise multiplier z; C is a function of these releases (Andrew et al. 2021)."
)


class DpSgdSentence(Sentence):
    """The mechanism of one step."""

    point, kind, title = "mechanism", "fact", "DP-SGD in every client"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a client was charged in a private run."""
        return facts.mechanism is not None and facts.has_charges

    @property
    def text(self) -> str:
        """The sentence in words."""
        facts = self.facts
        clipping = facts.mechanism.clipping if facts.mechanism else None
        how = _CLIPPINGS.get(clipping or "", "clipped to L2 norm C")
        noise = "of standard deviation z · C"
        if clipping == "per_layer":
            noise = "divided among the layers with the effect of standard deviation z · C"
        adaptation, bound = "", "C"
        if clipping == "adaptive":
            noise, adaptation = "of standard deviation above z · C", _ADAPTATION
            bound = "initial C"
        return (
            f"In each step every per-example gradient is {how}, Gaussian noise {noise} is added "
            f"once to the sum, and the result is divided by a public constant.{adaptation} Here "
            f"z = {range_text(self.values['noise_multiplier'])}, {bound} = {self._bounds()}, "
            f"sampling rate q = {range_text(self.values['sampling_rate'])}, {self._steps()}."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Ranges over the clients that were charged."""
        clients = [client for client in self.facts.clients if client.has_charges]
        names = ("noise_multiplier", "sampling_rate", "rounds", "steps")
        ranges = {name: _range([getattr(client, name) for client in clients]) for name in names}
        bounds = [c.max_grad_norm for c in clients if c.max_grad_norm is not None]
        return {**ranges, "max_grad_norm": _range(bounds) if bounds else None}

    def _bounds(self) -> str:
        bounds = self.values["max_grad_norm"]
        return "not recorded" if bounds is None else range_text(bounds)

    def _steps(self) -> str:
        low, high = self.values["steps"]
        steps = count_text(low, "step") if low == high else f"{low:,} to {high:,} steps"
        low, high = self.values["rounds"]
        rounds = count_text(low, "round") if low == high else f"{low:,} to {high:,} rounds"
        return f"{steps} in {rounds}"


class CorrelationSentence(Sentence):
    """Noise is correlated from step to step, and a run is one event."""

    point, kind, title = "mechanism", "fact", "Noise is correlated from step to step"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for correlated noise."""
        correlated = facts.mechanism is not None and facts.mechanism.noise_correlation is not None
        return facts.is_bounded and correlated

    @property
    def text(self) -> str:
        """The sentence in words."""
        bands = self.values["bands"]
        return (
            f"Each step takes back a part of the noise of the {bands - 1} steps before it (a "
            f"Toeplitz matrix with {bands} bands). An example can be in a lot once in {bands} "
            "steps at most; what these steps release about it is accounted for as one release. "
            "The whole planned run is one event, charged before its first step."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The number of bands."""
        recorded = self.facts.mechanism.noise_correlation if self.facts.mechanism else None
        bands = (recorded or {}).get("bands")
        return {"bands": bands if isinstance(bands, int) else 1}


class PublicConstantsSentence(Sentence):
    """What a step is scaled by does not depend on a private number of examples."""

    point, kind, title = "mechanism", "fact", "Divisor, noise and steps are public"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        sizes = "declared sizes" if self.facts.sizes_are_declared else "public client sizes"
        return (
            f"Divisor, sampling rate, noise and number of steps follow from settings and {sizes}: "
            "no private number of examples enters them, as it does where a library derives them "
            "from its data (arXiv:2605.15648)."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Whether sizes are declared numbers."""
        return {"declared_sizes": self.facts.sizes_are_declared}


class SamplerSentence(Sentence):
    """The sampler that ran is the one accounted for."""

    point, kind, title = "sampling", "claim", "Sampling as it ran and as it was accounted for"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee, so that both samplers are known to agree."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        lots = SAMPLING_SCHEMES[self.values["ran"]].statement
        return f"{lots[0].upper()}{lots[1:]}."

    @property
    def values(self) -> Mapping[str, Any]:
        """The sampler that ran and the event it was accounted for as."""
        ran = (self.facts.mechanism.sampling if self.facts.mechanism else None) or ""
        return {"ran": ran, "accounted_as": SAMPLING_SCHEMES[ran].event}


class AccountingSentence(Sentence):
    """The method behind every ε."""

    point, kind, title = "accounting", "claim", "How ε was computed"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee."""
        return facts.is_bounded

    @property
    def text(self) -> str:
        """The sentence in words."""
        version = self.facts.version
        by = f" by fedsim {version}" if version else ""
        return (
            f"Every ε was computed{by} with {self._method()}. Noise, sampling rates and step "
            "counts were fixed before the run, so the releases compose."
        )

    def _method(self) -> str:
        mechanism = self.facts.mechanism
        return "" if mechanism is None else _METHODS[mechanism.accountant]

    @property
    def values(self) -> Mapping[str, Any]:
        """The method and its version; every method is an upper bound."""
        method = self.facts.mechanism.accountant if self.facts.mechanism else ""
        return {"method": method, "version": self.facts.version, "upper_bound": True}


def _range(values: list[float]) -> list[float]:
    return [min(values), max(values)]


SENTENCES: tuple[type[Sentence], ...] = (
    DpSgdSentence,
    CorrelationSentence,
    PublicConstantsSentence,
    SamplerSentence,
    AccountingSentence,
)
