"""The mechanism of one step, its sampling and its accounting."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedsim.clients.mechanisms.kinds import KINDS, ReleaseKind
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.formatting import count_text, range_text
from fedsim.statement.facts import COUNTING_CLIPPINGS, Facts
from fedsim.statement.sentence import Sentence

_CLIPPINGS = {
    "flat": "clipped to L2 norm C as a whole",
    "per_layer": "clipped layer by layer, to bounds whose squares add up to C²",
    "automatic": "normalised to L2 norm below C",
    "adaptive": "clipped to L2 norm C as a whole",
    "groups": "clipped by groups of parameters, each to a bound of its own, whose squares add up "
    "to C²",
    "adaptive_groups": "clipped by groups of parameters, each to a bound of its own",
}
_METHODS = {
    "pld": "privacy loss distributions, discretised by connect-the-dots so that the result is an "
    "upper bound (Doroshenko et al. 2022)",
    "rdp": "Rényi differential privacy (Mironov 2017) with the conversion of Canonne, Kamath and "
    "Steinke 2020, an upper bound, usually about 10% above the exact value",
    "moments": "the moments accountant of Abadi et al. 2016, a loose upper bound",
}

_MAX_NAMED_ORDERS = 8
_GROUP_ADAPTATION = (
    " In each group a count of the lot's examples with norm within its bound, with Gaussian noise, "
    "moves the bound towards a quantile of the norms for the next step. Sums and counts of all "
    "groups are accounted for as one Gaussian release with noise multiplier z; the bounds are "
    "functions of these releases (Andrew et al. 2021)."
)
_ADAPTATION = (
    " A count of the lot's examples with norm below C, with Gaussian noise, moves C towards a "
    "quantile of the norms for the next step. Sum and count are accounted for as one Gaussian "
    "release with noise multiplier z; C is a function of these releases (Andrew et al. 2021)."
)
_CLIENT_ADAPTATION = (
    " One more coordinate, with Gaussian noise of its own, counts the updates with norm below S, "
    "and moves S towards a quantile of the norms for the next round. Update and count are one "
    "Gaussian release (Andrew et al. 2021)."
)
_ADDS_TO_UPDATE = {
    "local": "it adds",
    "distributed": "it adds its share of the noise,",
    "central": "the server adds, once to the sum of all updates,",
}
_ADDS_TO_VOTES = {
    "local": "adds",
    "distributed": "adds its share of the noise,",
    "central": "the server adds, once to the sum of all votes,",
}
_ADDS = {
    "local": "Gaussian noise {noise} is added once to the sum",
    "distributed": "the client adds its share of the noise, Gaussian {noise}, once to the sum",
    "central": "the server adds Gaussian noise {noise} once to the sum of all clients",
}


class ReleaseSentence(Sentence):
    """The mechanism of a kind of private release.

    Attributes:
        release: name of the kind.
    """

    point, kind = "mechanism", "fact"
    release: ClassVar[str]

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether a client was charged for releases of the kind."""
        charged = facts.mechanism is not None and facts.has_charges
        return charged and facts.kind.name == cls.release


class DpSgdSentence(ReleaseSentence):
    """The mechanism of one step."""

    title, release = "DP-SGD in every client", "dp_sgd"

    @property
    def text(self) -> str:
        """The sentence in words."""
        facts = self.facts
        clipping = facts.mechanism.clipping if facts.mechanism else None
        how = _CLIPPINGS.get(clipping or "", "clipped to L2 norm C")
        noise = "of standard deviation z · C"
        if clipping == "per_layer":
            noise = "divided among the layers with the effect of standard deviation z · C"
        if clipping in ("groups", "adaptive_groups"):
            noise = "of each group's own standard deviation, together with the effect of z · C"
        adaptation, bound = "", "C"
        if clipping == "adaptive":
            noise, adaptation = "of standard deviation above z · C", _ADAPTATION
            bound = "initial C"
        if clipping == "adaptive_groups":
            adaptation, bound = _GROUP_ADAPTATION, "initial C"
        if facts.trust.trust == "distributed":
            noise += f" / √{facts.trust.honest_clients}"
        adds = _ADDS.get(facts.trust.trust, _ADDS["local"]).format(noise=noise)
        return (
            f"In each step every per-example gradient is {how}, {adds}, and the result is divided "
            f"by a public constant.{adaptation} Here z = "
            f"{range_text(self.values['noise_multiplier'])}, {bound} = {self._bounds()}, "
            f"sampling rate q = {range_text(self.values['sampling_rate'])}, {self._steps()}."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Ranges over the clients that were charged."""
        return _ranges(self.facts, ("noise_multiplier", "sampling_rate", "rounds", "steps"))

    def _bounds(self) -> str:
        bounds = self.values["max_grad_norm"]
        return "not recorded" if bounds is None else range_text(bounds)

    def _steps(self) -> str:
        steps = _counts(self.values["steps"], "step")
        return f"{steps} in {_counts(self.values['rounds'], 'round')}"


class ClientUpdateSentence(ReleaseSentence):
    """The mechanism of one round where the unit is the client."""

    title, release = "One release of a whole update in a round", "client_update"

    @property
    def text(self) -> str:
        """The sentence in words."""
        facts, bounds = self.facts, self.values["max_grad_norm"]
        adapted, bound = "", "S"
        if facts.mechanism is not None and facts.mechanism.clipping in COUNTING_CLIPPINGS:
            adapted, bound = _CLIENT_ADAPTATION, "initial S"
        size = "not recorded" if bounds is None else range_text(bounds)
        shared = facts.trust.trust == "distributed"
        share = f" / √{facts.trust.honest_clients}" if shared else ""
        return (
            "A client trains with any number of steps and clips its whole update (new model minus "
            f"global model) to L2 norm S. Then {_ADDS_TO_UPDATE.get(facts.trust.trust, '')} "
            f"Gaussian noise of standard deviation z · S{share}.{adapted} A round is one release: "
            "local training has no noise, and its result leaves the client in this form only. Here "
            f"z = {range_text(self.values['noise_multiplier'])}, {bound} = {size}, "
            f"{_counts(self.values['rounds'], 'round')}."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Ranges over the clients that were charged."""
        return _ranges(self.facts, ("noise_multiplier", "rounds"))


class WordsSentence(ReleaseSentence):
    """The mechanism of a kind whose words are in the registry of kinds."""

    @property
    def text(self) -> str:
        """The sentence in words."""
        kind, values = self.facts.kind, self.values
        bound = values.get(kind.bound)
        return kind.statement.format(
            z=range_text(values["noise_multiplier"]),
            rounds=_counts(values["rounds"], "round"),
            bound="not recorded" if bound is None else range_text(bound),
            max_feature_norm=values.get("max_feature_norm"),
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Ranges over the clients that were charged, and the recorded bounds."""
        facts = self.facts
        ranges = dict(_ranges(facts, ("noise_multiplier", "rounds")))
        bound, recorded = ranges.pop("max_grad_norm"), dict(facts.off_gradients or {})
        recorded.pop("name", None)
        return {**ranges, **recorded, **({facts.kind.bound: bound} if facts.kind.bound else {})}


def sentence_of(kind: ReleaseKind) -> type[Sentence]:
    """Return the sentence of a kind that has words; its id is the kind's name.

    Args:
        kind: with a title and a statement.
    """
    words = kind.name.removesuffix("_perturbation").split("_")
    name = "".join(word.title() for word in words) + "Sentence"
    return type(name, (WordsSentence,), {"title": kind.title, "release": kind.name})


class VotesSentence(ReleaseSentence):
    """The mechanism of a ballot."""

    title, release = "Noisy votes on public queries", "votes"

    @property
    def text(self) -> str:
        """The sentence in words."""
        votes, trust = self.values, self.facts.trust
        shared = f" / √{trust.honest_clients}" if trust.trust == "distributed" else ""
        adds = _ADDS_TO_VOTES.get(trust.trust, _ADDS_TO_VOTES["local"])
        return (
            "Each client trains a teacher on all of its examples, without noise, and keeps it. It "
            "votes for one class of each public query of a ballot, and "
            f"{adds} Gaussian noise of standard deviation z · σ{shared} votes to each count. A "
            f"check of {votes['queries']:,} queries has σ = {votes['sigma_threshold']:g}; the "
            "queries that pass its threshold are answered in a vote, of at most "
            f"{votes['answers']:,} queries, with σ = {votes['sigma']:g}. Here z = "
            f"{range_text(votes['noise_multiplier'])}. Each query is charged as a Gaussian release "
            "with noise multiplier z · σ / √2, in the check and again in the vote, also where it "
            "is not answered: the observer may see the whole noisy histogram. No cost depends on "
            "the votes (the data-dependent bound of PATE is not used)."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Numbers of queries, the noise, and the range of noise multipliers."""
        noise = _ranges(self.facts, ("noise_multiplier",))["noise_multiplier"]
        return {**(self.facts.trust.votes or {}), "noise_multiplier": noise}


class SharedNoiseSentence(Sentence):
    """The noise of a sum, which comes from several clients."""

    point, kind, title = "mechanism", "fact", "The noise of a sum"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee against an observer of sums."""
        return facts.is_bounded and facts.trust.trust == "distributed"

    @property
    def text(self) -> str:
        """The sentence in words."""
        honest, low, high = self.facts.trust.honest_clients, *self.values["noise_multiplier"]
        return (
            f"A sum has the noise of at least {count_text(honest, 'honest client')}, with equal "
            "standard deviations on one public grid: integers add up exactly, and nothing is "
            "clipped after the noise. Against an observer of sums, the noise multiplier of a "
            f"client is z = {range_text((low, high))}, √{honest} times that of its own share. "
            "Weights act before the grid. The charge is that of the smallest sum that "
            "may be opened, however many clients came."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """Range of the noise multipliers against an observer of sums, and the honest clients."""
        noise = _ranges(self.facts, ("noise_multiplier",))["noise_multiplier"]
        return {"noise_multiplier": noise, "honest_clients": self.facts.trust.honest_clients}


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
        if self.facts.protects_clients:
            return (
                "Divisor, noise and number of rounds follow from settings: no number of examples "
                "and no metric leaves a client."
            )
        if self.facts.off_gradients is not None:
            return (
                "Bounds, noise and number of steps follow from settings and public client sizes: "
                "no private number of examples enters them."
            )
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
        """Whether there is a guarantee of lots, so that both samplers are known to agree."""
        return facts.is_bounded and facts.kind.draws_lots

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


class EveryRoundSentence(Sentence):
    """Rounds of whole updates, which no draw of clients amplifies."""

    point, kind, title = "sampling", "claim", "Every round is charged in full"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for clients, without secret participation."""
        drawn = facts.trust.participation_rate is not None
        return facts.is_bounded and facts.protects_clients and not drawn

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "A round is charged in full to every client that takes part: who takes part is public, "
            "so that drawing clients amplifies nothing."
        )


class DrawnClientsSentence(Sentence):
    """Clients that the server draws in secret, which amplifies the client unit."""

    point, kind, title = "sampling", "claim", "Clients are drawn in secret"

    @classmethod
    def holds(cls, facts: Facts) -> bool:
        """Whether there is a guarantee for clients that are drawn by Poisson sampling."""
        return facts.is_bounded and facts.trust.participation_rate is not None

    @property
    def text(self) -> str:
        """The sentence in words."""
        return (
            "In each round the server draws each client independently with probability p = "
            f"{self.facts.trust.participation_rate or 0.0:.4g}, and charges the round to every "
            "client as that Poisson sample, drawn or not. The sum is divided by p · N, no number "
            "of clients ends a round, and a round without clients releases noise. The list and the "
            "number of participants stay with the server: they are in no report, record or ledger. "
            "There is no such guarantee against a party that sees who takes part, as on a network."
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """The probability of a draw."""
        return {"rate": self.facts.trust.participation_rate}


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
            f"Every ε was computed{by} with {self._method()}. {self.facts.kind.fixed} were fixed "
            "before the run, so the releases compose."
        )

    def _method(self) -> str:
        mechanism = self.facts.mechanism
        if mechanism is None:
            return ""
        orders = "" if mechanism.orders is None else f", at orders {_orders(mechanism.orders)}"
        return _METHODS[mechanism.accountant] + orders

    @property
    def values(self) -> Mapping[str, Any]:
        """The method and its version; every method is an upper bound."""
        method = self.facts.mechanism.accountant if self.facts.mechanism else ""
        return {"method": method, "version": self.facts.version, "upper_bound": True}


def _orders(orders: tuple[float, ...]) -> str:
    """Return few orders in full, many by their number and range."""
    if len(orders) <= _MAX_NAMED_ORDERS:
        return ", ".join(f"{order:g}" for order in orders)
    return f"of the file, {len(orders)} from {min(orders):g} to {max(orders):g}"


def _ranges(facts: Facts, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the ranges of figures over the clients that were charged."""
    clients = [client for client in facts.clients if client.has_charges]
    ranges = {name: _range([getattr(client, name) for client in clients]) for name in names}
    bounds = [c.max_grad_norm for c in clients if c.max_grad_norm is not None]
    return {**ranges, "max_grad_norm": _range(bounds) if bounds else None}


def _range(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _counts(low_and_high: list[int], noun: str) -> str:
    low, high = low_and_high
    return count_text(low, noun) if low == high else f"{low:,} to {high:,} {noun}s"


SENTENCES: tuple[type[Sentence], ...] = (
    DpSgdSentence,
    ClientUpdateSentence,
    *(sentence_of(kind) for kind in KINDS.values() if kind.statement),
    VotesSentence,
    SharedNoiseSentence,
    CorrelationSentence,
    PublicConstantsSentence,
    SamplerSentence,
    EveryRoundSentence,
    DrawnClientsSentence,
    AccountingSentence,
)
