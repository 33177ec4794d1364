"""Sentences on the mechanism, its sampling and accounting, and the model's public parts."""

from functools import partial
from typing import Any

from fedsim.clients.mechanisms.kinds import KINDS, ReleaseKind
from fedsim.clients.sampling.schemes import SAMPLING_SCHEMES
from fedsim.core.formatting import count_text, range_text
from fedsim.noise.correlated.settings import OF_ROUNDS
from fedsim.statement.facts import Facts
from fedsim.statement.sentence import Row, Said, StatementTable, is_charged, is_private, of_sums

TABLE = StatementTable()
mechanism = partial(TABLE.sentence, "mechanism", "fact")
sampling = partial(TABLE.sentence, "sampling", "claim")

_CLIENT_ADAPTATION = (
    " One more coordinate, with Gaussian noise of its own, counts the updates with norm below S, "
    "and moves S towards a quantile of the norms for the next round. Update and count are one "
    "Gaussian release (Andrew et al. 2021)."
)
_ADDS = {
    "local": "Gaussian noise {noise} is added once to the sum",
    "distributed": "the client adds its share of the noise, which is Gaussian {noise}, once to the "
    "sum",
    "central": "the server adds Gaussian noise {noise} once to the sum of all clients",
}
_ADDS_ONCE = {
    "local": "it adds",
    "distributed": "it adds its share of the noise,",
    "central": "the server adds, once to the sum of all {},",
}
_METHODS = {
    "pld": "privacy loss distributions, discretised (connect-the-dots) so that the result is an "
    "upper bound (Doroshenko et al. 2022)",
    "rdp": "Rényi differential privacy (Mironov 2017) with the conversion of Canonne, Kamath and "
    "Steinke 2020, an upper bound, usually about 10% above the exact value",
    "moments": "the moments accountant of Abadi et al. 2016, a loose upper bound",
}
_MAX_NAMED_ORDERS = 8


def _charged(kind: str, facts: Facts) -> bool:
    """Whether a client was charged for releases of a kind."""
    return is_charged(facts) and facts.kind.name == kind


def _ranges(facts: Facts, *names: str) -> dict[str, Any]:
    """Return [smallest, largest] of each figure over the charged clients; None if not recorded."""
    clients = [client for client in facts.clients if client.has_charges]
    figures = {name: [getattr(client, name) for client in clients] for name in names}
    known = {name: [v for v in values if v is not None] for name, values in figures.items()}
    return {name: [min(values), max(values)] if values else None for name, values in known.items()}


def _bound_text(bounds: list[float] | None) -> str:
    return "not recorded" if bounds is None else range_text(bounds)


def _counts(low_and_high: list[int], noun: str) -> str:
    low, high = low_and_high
    return count_text(low, noun) if low == high else f"{low:,} to {high:,} {noun}s"


def _of_share(facts: Facts) -> str:
    """Return the factor that makes a standard deviation that of one client's share of noise."""
    trust = facts.trust
    return f" / √{trust.honest_clients}" if trust.trust == "distributed" else ""


@mechanism("DP-SGD in every client", holds=partial(_charged, "dp_sgd"))
def dp_sgd(facts: Facts) -> Said:
    """Return the sentences on the mechanism of one DP-SGD step."""
    values = _ranges(facts, "noise_multiplier", "sampling_rate", "rounds", "steps", "max_grad_norm")
    how, noise, adaptation = facts.mechanism.clip_words
    bound = "initial C" if adaptation else "C"
    adds = _ADDS.get(facts.trust.trust, _ADDS["local"]).format(noise=noise + _of_share(facts))
    return (
        f"In each step every per-example gradient is {how}. Then {adds}, and the result is divided "
        f"by a public constant.{adaptation} Here z = {range_text(values['noise_multiplier'])}, "
        f"{bound} = {_bound_text(values['max_grad_norm'])}, sampling rate q = "
        f"{range_text(values['sampling_rate'])}, {_counts(values['steps'], 'step')} in "
        f"{_counts(values['rounds'], 'round')}."
    ), values


@mechanism("One release of a whole update in a round", holds=partial(_charged, "client_update"))
def client_update(facts: Facts) -> Said:
    """Return the sentences on the mechanism of one round, for a run whose unit is the client."""
    values = _ranges(facts, "noise_multiplier", "rounds", "max_grad_norm")
    adapted, bound, adds = "", "S", _ADDS_ONCE.get(facts.trust.trust, "").format("updates")
    if facts.mechanism.clip_words.adaptation:
        adapted, bound = _CLIENT_ADAPTATION, "initial S"
    return (
        "A client trains with any number of steps and clips its whole update (new model minus "
        f"global model) to L2 norm S. Then {adds} Gaussian noise of standard deviation z · "
        f"S{_of_share(facts)}.{adapted} A round is one release: local training has no noise, and "
        "its result leaves the client in this form only. "
        f"Here z = {range_text(values['noise_multiplier'])}, {bound} = "
        f"{_bound_text(values['max_grad_norm'])}, {_counts(values['rounds'], 'round')}."
    ), values


def row_of(kind: ReleaseKind) -> Row:
    """Return the template of the sentence on a mechanism: `kind.title` and `kind.statement`."""
    name = kind.name.removesuffix("_perturbation")
    return Row(name, "mechanism", "fact", kind.title, partial(_charged, kind.name), _of_kind)


def _of_kind(facts: Facts) -> Said:
    """Return the text of a kind, with ranges over the charged clients and the recorded bounds."""
    kind, recorded = facts.kind, dict(facts.mechanism.off_gradients or {})
    values = _ranges(facts, "noise_multiplier", "rounds") | recorded
    values.pop("name", None)
    if kind.bound:
        values[kind.bound] = _ranges(facts, "max_grad_norm")["max_grad_norm"]
    text = kind.statement.format(
        z=range_text(values["noise_multiplier"]),
        rounds=_counts(values["rounds"], "round"),
        bound=_bound_text(values.get(kind.bound)),
        max_feature_norm=values.get("max_feature_norm"),
    )
    return text, values


TABLE.extend(row_of(kind) for kind in KINDS.values() if kind.statement)


@mechanism("Noisy votes on public queries", holds=partial(_charged, "votes"))
def votes(facts: Facts) -> Said:
    """Return the sentences on the mechanism of the votes on public queries."""
    values = {**(facts.trust.votes or {}), **_ranges(facts, "noise_multiplier")}
    adds = _ADDS_ONCE.get(facts.trust.trust, _ADDS_ONCE["local"]).format("votes")
    return (
        "Each client trains a teacher on all of its examples, without noise, and keeps it. It "
        f"votes for one class of each public query of a ballot, and {adds.removeprefix('it ')} "
        f"Gaussian noise of standard deviation z · σ{_of_share(facts)} votes to each count. A "
        f"check of {values['queries']:,} queries has σ = {values['sigma_threshold']:g}; the "
        "queries that pass its threshold are answered in a vote, of at most "
        f"{values['answers']:,} queries, with σ = {values['sigma']:g}. Here z = "
        f"{range_text(values['noise_multiplier'])}. Each query is charged as a Gaussian release "
        "with noise multiplier z · σ / √2, in the check and again in the vote, also where it is "
        "not answered: the observer may see the whole noisy histogram. No cost depends on the "
        "votes (the data-dependent bound of PATE is not used)."
    ), values


@mechanism("The noise of a sum", when=of_sums)
def shared_noise(facts: Facts) -> Said:
    """Return the sentences saying that the noise of a sum comes from several clients."""
    honest, values = facts.trust.honest_clients, _ranges(facts, "noise_multiplier")
    return (
        f"A sum has the noise of at least {count_text(honest, 'honest client')}, with equal "
        "standard deviations on one public grid: integers add up exactly, and nothing is "
        "clipped after noise is added. Against an observer of sums, the noise multiplier of a "
        f"client is z = {range_text(values['noise_multiplier'])}, √{honest} times that of its own "
        "share. Weights are applied before values are rounded to the grid. The charge is that of "
        "the smallest sum that may be opened, however many clients take part."
    ), {**values, "honest_clients": honest}


def _is_correlated(facts: Facts) -> bool:
    return facts.mechanism.noise_correlation is not None


@mechanism(
    "Noise is correlated from step to step",
    when=lambda facts: _is_correlated(facts) and not facts.protects_clients,
)
def correlation(facts: Facts) -> Said:
    """Return the sentences on noise that is correlated over steps, and on how it is charged."""
    bands = (facts.mechanism.noise_correlation or {}).get("bands")
    bands = bands if isinstance(bands, int) else 1
    return (
        f"Each step takes back a part of the noise of the {bands - 1} steps before it (a "
        f"Toeplitz matrix with {bands} bands). An example can be in a batch once in {bands} "
        "steps at most; what these steps release about it is accounted for as one release. "
        "The whole planned run is one event, charged before its first step."
    ), {"bands": bands}


def _largest_rho(facts: Facts) -> float:
    return max(client.rho for client in facts.clients if client.has_charges)


@mechanism(
    "Noise is correlated from round to round",
    when=lambda facts: _is_correlated(facts) and facts.protects_clients,
)
def round_correlation(facts: Facts) -> Said:
    """Return the sentences on noise correlated over rounds, and how often a client takes part."""
    values = {**(facts.mechanism.noise_correlation or {}), "zcdp": _largest_rho(facts)}
    return (
        f"The noise of a round takes back a part of the noise of earlier rounds, by "
        f"{OF_ROUNDS[values['name']]}. The guarantee rests on this participation: a "
        f"client is in at most {values['max_rounds']:,} of {values['rounds']:,} rounds, and two of "
        f"its rounds are at least {values['rounds_apart']:,} apart. The schedule fixes this before "
        "the run, and a client that misses its turn waits for the next one. All that the run "
        "releases about a client is accounted for as one Gaussian release with noise multiplier "
        f"z / {values['sensitivity']:.4g}, charged before its first round: ρ-zCDP with ρ = "
        f"{values['zcdp']:.4g}, not counting the noise sampler."
    ), values


@mechanism("Divisor, noise and steps are public")
def public_constants(facts: Facts) -> Said:
    """Return the sentence saying that no private number of examples enters divisor or noise."""
    sizes = "declared sizes" if facts.sizes_are_declared else "public client sizes"
    text = (
        f"Divisor, sampling rate, noise and number of steps follow from settings and {sizes}: "
        "no private number of examples enters them. This differs from libraries that derive them "
        "from the data (arXiv:2605.15648)."
    )
    if facts.protects_clients:
        text = (
            "Divisor, noise and number of rounds follow from settings: no number of examples "
            "and no metric leaves a client."
        )
    elif facts.mechanism.off_gradients is not None:
        text = (
            "Bounds, noise and number of steps follow from settings and public client sizes: "
            "no private number of examples enters them."
        )
    return text, {"declared_sizes": facts.sizes_are_declared}


@sampling(
    "Sampling as it ran and as it was accounted for", when=lambda facts: facts.kind.draws_batches
)
def sampler(facts: Facts) -> Said:
    """Return the sentence on how batches were sampled, which is also what ε accounts for."""
    scheme = SAMPLING_SCHEMES[facts.mechanism.sampling or ""]
    text = f"{scheme.statement[0].upper()}{scheme.statement[1:]}."
    return text, {"ran": scheme.name, "accounted_as": scheme.event}


TABLE.fixed(
    "sampling",
    "claim",
    "every_round",
    "Every round is charged in full",
    "A round is charged in full to every client that takes part: who takes part is public, so that "
    "drawing clients amplifies nothing.",
    holds=lambda facts: (
        facts.is_bounded
        and facts.protects_clients
        and facts.trust.participation_rate is None
        and not _is_correlated(facts)
    ),
)


@sampling(
    "Clients are drawn in secret", when=lambda facts: facts.trust.participation_rate is not None
)
def drawn_clients(facts: Facts) -> Said:
    """Return the sentences saying that clients are drawn in secret, and how rounds are charged."""
    return (
        "In each round the server draws each client independently with probability p = "
        f"{facts.trust.participation_rate or 0.0:.4g}, and charges the round to every "
        "client as that Poisson sample, drawn or not. The sum is divided by p · N, the end of a "
        "round does not depend on its number of clients, and a round without clients releases "
        "noise. The list and the number of participants stay with the server: they are in no "
        "report, record or ledger. There is no such guarantee against a party that sees who takes "
        "part, as on a network."
    ), {"rate": facts.trust.participation_rate}


@TABLE.sentence("accounting", "claim", "How ε was computed")
def accounting(facts: Facts) -> Said:
    """Return the sentences on the method that computes every ε as an upper bound."""
    orders, by = facts.mechanism.orders, f" by fedsim {facts.version}" if facts.version else ""
    method, at = _METHODS[facts.mechanism.accountant or ""], ""
    if orders is not None:
        at = f", at orders {', '.join(f'{order:g}' for order in orders)}"
        if len(orders) > _MAX_NAMED_ORDERS:
            at = f", at orders of the file, {len(orders)} from {min(orders):g} to {max(orders):g}"
    return (
        f"Every ε was computed{by} with {method}{at}. {facts.kind.fixed} were fixed "
        "before the run, so one ε can be computed for all releases together."
    ), {"method": facts.mechanism.accountant, "version": facts.version, "upper_bound": True}


@TABLE.sentence(
    "accounting",
    "claim",
    "Zero-concentrated differential privacy",
    when=lambda facts: facts.mechanism.target_rho is not None,
)
def concentrated(facts: Facts) -> Said:
    """Return the sentence on ρ, to which the noise was calibrated in place of an ε."""
    target, rho = facts.mechanism.target_rho, _largest_rho(facts)
    return (
        f"The noise was calibrated to ρ = {target:.4g} of zero-concentrated DP. By its "
        f"ledger every client has ρ = {rho:.4g} at most, not counting the noise "
        "sampler: Gaussian releases add up, and no sampling is assumed."
    ), {"rho": rho, "target_rho": target}


def _model_parts(facts: Facts) -> dict[str, Any]:
    """Return the public parts but for the constants of columns, which belong to the data."""
    return {k: part for k, part in (facts.public_parts or {}).items() if k != "constants"}


_PARTS = {
    "features": "Examples are transformed before training ({}). The transforms are fixed and "
    "public, and each uses one example at a time, so they cost no ε. Choosing them by looking at "
    "private data is tuning, which no ε of this run covers.",
    "init": "The initial weights come from the file {}, which counts as public: no ε covers what "
    "they reveal about data that trained them.",
    "freeze": "The parameters {} are not trained: they get no gradient, no noise and no update.",
    "trained": "Only these are trained: {}. All other parameters are frozen, get no noise, and are "
    "in no message.",
    "directions": "A step releases the slopes of the loss along {}, which are drawn from the seed "
    "and public: an upload is these numbers and nothing else, and the update along the directions "
    "is a function of them.",
}


@TABLE.sentence(
    "mechanism",
    "limit",
    "Parts of the model that are public",
    holds=is_private,
    when=lambda facts: bool(_model_parts(facts)),
)
def public_parts(facts: Facts) -> Said:
    """Return the sentences on public parts of the model, which no ε covers."""
    parts = _model_parts(facts)
    trained, directions = [*map(str, parts.get("train") or ())], parts.get("directions")
    if layers := parts.get("lora"):
        trained.append(f"low-rank adapters of {', '.join(map(str, layers))}")
    words = {
        "features": ", ".join(map(str, parts.get("features") or ())),
        "init": parts.get("init"),
        "freeze": ", ".join(map(str, parts.get("freeze") or ())),
        "trained": ", ".join(trained),
        "directions": directions and f"{directions} direction{'' if directions == 1 else 's'}",
    }
    texts = (text.format(words[name]) for name, text in _PARTS.items() if words[name])
    return " ".join(texts), parts
