"""Settings of differential privacy (section `privacy:` of an experiment file).

A key that chooses a method also takes the settings of that method, as in `clipping: {name:
adaptive, quantile: 0.3}`.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedsim.clients.client_settings import ClientPrivacySettings, OwnPrivacySettings
from fedsim.clients.mechanisms.conditions import CORRELATED, Choices
from fedsim.clients.mechanisms.dp_sgd.settings import (
    ClippingSettings,
    FlatClippingSettings,
    SamplingSettings,
    check_correlation_needs,
    check_groups,
    has_all_noise,
)
from fedsim.clients.mechanisms.kinds import GRADIENT_PERTURBATION, ReleaseKind, kind_of
from fedsim.clients.sampling.schemes import POISSON, SAMPLING_SCHEMES
from fedsim.core.limits import MAX_CLIENTS, MAX_EXAMPLES, MAX_RENYI_ORDER
from fedsim.core.settings import Choice, Probability, Settings
from fedsim.noise.correlated import settings as correlations

if TYPE_CHECKING:
    from fedsim.accountant.accountants import AccountantChoice


class PlainTrustSettings(Settings):
    """Settings of local trust (each client adds all noise) or central trust (the server does)."""

    name: Literal["local", "central"] = Field(description="whom to trust; see `privacy.trust`")
    colluding_clients: ClassVar[int] = 0
    fallback_epsilon: ClassVar[None] = None


class DistributedTrustSettings(Settings):
    """Settings of distributed trust: clients add shares of the noise; only sums are decrypted."""

    name: Literal["distributed"] = Field(description="whom to trust; see `privacy.trust`")
    colluding_clients: int = Field(
        default=1,
        ge=0,
        lt=MAX_CLIENTS,
        description="number of clients of a sum that may collude with the adversary, or add no "
        "noise; by default 1, since every client sees the models and knows its own noise",
    )
    fallback_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="largest ε of a client against an adversary who sees the client's upload; it "
        "raises the client's share of the noise; null: no bound",
    )


class PublicSizeSettings(Settings):
    """Settings of an adjacency whose neighbouring datasets have the same public size."""

    name: Literal["zero_out", "replace_one"] = Field(
        description="which datasets are neighbours; see `privacy.adjacency`"
    )
    declared_examples: ClassVar[None] = None


class PrivateSizeSettings(Settings):
    """Settings of add_remove adjacency: one of two neighbouring datasets has one more example."""

    name: Literal["add_remove"] = Field(
        description="which datasets are neighbours; see `privacy.adjacency`"
    )
    declared_examples: int = Field(
        ge=1,
        le=MAX_EXAMPLES,
        description="public number of examples, such as 1000, that sets the sampling rate in place "
        "of a client's private size",
    )


class _AccountantSettings(Settings):
    target_rho: float | None = Field(
        default=None,
        gt=0,
        description="ρ of zero-concentrated DP, to which the noise is calibrated in place of "
        "target_epsilon; for releases without sampling; null: the noise follows from "
        "target_epsilon or noise_multiplier",
    )

    @model_serializer(mode="wrap")
    def _without_null(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys of a file: target_rho comes last, and only if it is used."""
        written = handler(self)
        rho = written.pop("target_rho", None)
        return written if rho is None else {**written, "target_rho": rho}


class PlainAccountantSettings(_AccountantSettings):
    """Settings of an accountant that has no settings besides its name and a target."""

    name: Literal["pld", "moments"] = Field(description="the accountant; see `privacy.accountant`")
    orders: ClassVar[None] = None


class RenyiAccountantSettings(_AccountantSettings):
    """Settings of the accountant of Rényi differential privacy."""

    name: Literal["rdp"] = Field(description="the accountant; see `privacy.accountant`")
    orders: (
        Annotated[list[Annotated[float, Field(gt=1, le=MAX_RENYI_ORDER)]], Field(min_length=1)]
        | None
    ) = Field(
        default=None,
        description="Rényi orders, each above 1, in place of the default ones: more orders can "
        "only lower ε; null: 1.05 to 1024",
    )


class GradientPerturbationSettings(Settings):
    """Settings of a mechanism that adds noise to clipped gradients or clipped client updates."""

    name: Literal["gradient_perturbation"] = Field(
        description="where the noise goes; see `privacy.mechanism`"
    )


class BoundedExamplesSettings(Settings):
    """Settings of output and input perturbation, which clip features instead of gradients."""

    name: Literal["output_perturbation", "input_perturbation"] = Field(
        description="where the noise goes; see `privacy.mechanism`"
    )
    max_feature_norm: float = Field(
        gt=0,
        description="L2 bound R of the features of an example; longer ones are scaled down to it",
    )
    max_target_norm: float | None = Field(
        default=None,
        gt=0,
        description="L2 bound Y of the target of an example under the loss mse",
    )


class PrivacySettings(Settings):
    """The section `privacy:` of an experiment file: trust model, unit, budget and mechanism."""

    trust: Annotated[PlainTrustSettings | DistributedTrustSettings, Choice()] = Field(
        default=PlainTrustSettings(name="local"),
        description="who is trusted with values before they have their full noise; local: nobody, "
        "each client adds its full noise; distributed: nobody, clients add shares of the noise and "
        "only sums are opened; central: the server, which adds the noise",
    )
    unit: Literal["example", "client"] = Field(
        default="example",
        description="what ε protects: one example of a client, or all examples of a client",
    )
    target_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="budget ε, never exceeded; without noise_multiplier the noise is calibrated "
        "to spend it over the whole planned run",
    )
    noise_multiplier: float | None = Field(
        default=None,
        ge=0,
        description="noise standard deviation divided by max_grad_norm or max_update_norm",
    )
    delta: Probability | Literal["auto"] = Field(
        description="δ of the guarantee, which should be well below 1 / (a client's examples), or "
        "1 / (number of clients) with unit: client; auto: the largest power of ten that is at most "
        "a tenth of that"
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="L2 bound C of one example's gradient; for unit: example"
    )
    max_update_norm: float | None = Field(
        default=None, gt=0, description="L2 bound S of a client's whole update; for unit: client"
    )
    mechanism: Annotated[GradientPerturbationSettings | BoundedExamplesSettings, Choice()] = Field(
        default=GradientPerturbationSettings(name=GRADIENT_PERTURBATION),
        description="where the noise goes; gradient_perturbation: on clipped gradients, or on a "
        "whole update with unit: client; output_perturbation: on a linear model after training "
        "without noise, once a round; input_perturbation: on every example, once before the first "
        "round, so that rounds cost nothing more",
    )
    clipping: ClippingSettings = Field(
        default=FlatClippingSettings(name="flat"),
        description="flat: one bound for the whole gradient, or for each group of parameters; "
        "per_layer: one bound for each layer; automatic: gradients are normalised; adaptive: one "
        "bound that each client adapts by a noisy count, from max_grad_norm on; with unit: client, "
        "one bound for the whole update, which is constant (flat) or adapted by the server "
        "(adaptive)",
    )
    sampling: Annotated[SamplingSettings, Choice()] = Field(
        default=SamplingSettings(name=POISSON.name),
        description="how batches are drawn, and so what is charged for them; "
        f"{POISSON.name}: {POISSON.description}",
    )
    noise: Literal["seeded", "secure"] = Field(
        default="seeded",
        description="source of randomness; seeded: anyone who knows the seed can reproduce batches "
        "and noise; secure: batches and noise come from the operating system, so that no run can "
        "be repeated",
    )
    noise_correlation: Annotated[correlations.NoiseCorrelationSettings, Choice()] = Field(
        default=correlations.IndependentNoiseSettings(name="none"),
        description=correlations.DESCRIPTION,
    )
    adjacency: Annotated[PublicSizeSettings | PrivateSizeSettings, Choice()] = Field(
        default=PublicSizeSettings(name="zero_out"),
        description="neighbouring datasets; zero_out and replace_one treat client sizes as public",
    )
    accountant: Annotated[PlainAccountantSettings | RenyiAccountantSettings, Choice()] = Field(
        default=PlainAccountantSettings(name="pld"),
        description="method that computes ε, for the report and the calibration of noise: pld, "
        "which is tight; rdp; or moments, the loose bound of Abadi et al. 2016, for comparison",
    )
    on_exhausted: Literal["refuse", "withdraw", "stop"] = Field(
        default="refuse",
        description="refuse: a plan that exceeds a client's target_epsilon does not start; "
        "withdraw: a client leaves when its budget affords no further step; stop: the run ends at "
        "that moment",
    )
    clients: dict[str, ClientPrivacySettings] = Field(
        default={},
        description="settings of single clients by number, and of groups by any other name",
    )

    @property
    def is_correlated(self) -> bool:
        """Whether noise takes back noise of earlier steps or rounds."""
        return self.noise_correlation.name != "none"

    @property
    def accounting(self) -> "AccountantChoice":
        """Accountant that computes ε, with the Rényi orders of the settings if there are any."""
        # Imported here: numpy and scipy are slow to import, and reading a file needs neither.
        from fedsim.accountant.accountants import choose_accountant

        return choose_accountant(self.accountant.name, self.accountant.orders)

    @property
    def clip_norm(self) -> float:
        """L2 bound on what one privacy unit (example or client) contributes to a release.

        It is the clipping norm; with groups of parameters, the L2 norm of the groups' norms.

        Raises:
            ValueError: the mechanism clips neither gradients nor updates.
        """
        if self.clipping.groups:
            return math.hypot(*(group.max_grad_norm for group in self.clipping.groups.values()))
        bound = getattr(self, self.release_kind.bound, None)
        if bound is None:
            raise ValueError(f"unit {self.unit} has no bound")
        return bound

    @property
    def release_kind(self) -> ReleaseKind:
        """Fixed properties of the privacy mechanism that the settings select."""
        return kind_of(unit=self.unit, mechanism=self.mechanism.name, votes=False)

    @property
    def example_bound(self) -> float | None:
        """L2 bound on a clipped per-example gradient, over all parameters together.

        None if per-example gradients are not clipped.
        """
        return self.clip_norm if self.clipping.groups else self.max_grad_norm

    @property
    def gives_noise(self) -> bool:
        """Whether the settings give the noise multiplier, so that it is not calibrated to an ε."""
        groups = self.clipping.groups
        return self.noise_multiplier is not None or (bool(groups) and has_all_noise(groups))

    @property
    def goal(self) -> str:
        """What the noise is chosen for, in words: a target ε or ρ; "" if the settings give it."""
        if self.target_epsilon is not None:
            return f"target ε = {self.target_epsilon:g}"
        rho = self.accountant.target_rho
        return "" if rho is None else f"target ρ = {rho:g}"

    @property
    def adds_noise(self) -> bool:
        """Whether the settings let any client add noise; clipping alone gives no privacy."""
        return self.noise_multiplier != 0.0 or any(
            entry.noise_multiplier or "noise_multiplier" in entry.columns
            for entry in self.clients.values()
        )

    def choices(
        self,
        *,
        votes: bool = False,
        local_steps: int | None = 1,
        optimizer: str = "sgd",
        draws_clients: bool = False,
        protocol: str | None = None,
    ) -> Choices:
        """Return all choices of an experiment on which privacy theorems depend.

        The arguments come from other sections of the experiment file than `privacy:`.

        Args:
            votes: whether clients vote instead of training (`task: pate`).
            local_steps: number of noisy steps of a client in a round. None if it is not the same
                for all clients, or was not recorded.
            optimizer: name of the local optimizer.
            draws_clients: whether each client is drawn into a round independently, and who was
                drawn is kept secret, so that sampling of clients amplifies privacy.
            protocol: protocol of secure aggregation; None without.
        """
        return Choices(
            trust=self.trust.name,
            unit=self.unit,
            votes=votes,
            mechanism=self.mechanism.name,
            adjacency=self.adjacency.name,
            sampling=self.sampling.name,
            clipping=self.recorded_clipping,
            noise=self.noise,
            correlation=self.noise_correlation.name,
            local_steps=local_steps,
            optimizer=optimizer,
            draws_clients=draws_clients,
            protocol=protocol,
        )

    @property
    def recorded_clipping(self) -> str:
        """Name under which `privacy.json` records the clipping.

        If the settings list groups of parameters, the name is `groups` or `adaptive_groups`.
        """
        if not self.clipping.groups:
            return self.clipping.name
        return "adaptive_groups" if self.clipping.name == "adaptive" else "groups"

    @property
    def counts_in_sums(self) -> bool:
        """Whether adaptive clipping puts its count of unclipped updates into the noisy sum."""
        return self.release_kind.protects_client and self.trust.name != "local"

    @property
    def own_values(self) -> tuple[object, ...]:
        """Common values of those settings that `privacy.clients` can change for some clients."""
        values = {**vars(self), "sampling_rate": self.sampling.rate}
        return tuple(values[name] for name in OwnPrivacySettings.model_fields)

    def with_own(self, changes: OwnPrivacySettings) -> "PrivacySettings":
        """Return these settings with the values of one client.

        Args:
            changes: the client's own values; None leaves the value of these settings.
        """
        given = {name: value for name, value in changes if value is not None}
        rate = given.pop("sampling_rate", None)
        settings = self if rate is None else self.with_choice("sampling", rate=rate)
        return settings.model_copy(update=given)

    def with_choice(self, key: str, **changes: object) -> "PrivacySettings":
        """Return the settings with some keys inside one section changed.

        Args:
            key: key of the section in `privacy:`, such as `sampling`.
            changes: new values by key inside this section, such as `rate`.
        """
        return self.model_copy(update={key: getattr(self, key).model_copy(update=changes)})

    @model_validator(mode="after")
    def _whose_settings(self) -> Self:
        for name, entry in self.clients.items():
            entry.check(name)
        return self

    @model_validator(mode="after")
    def _bound_of_the_unit(self) -> Self:
        kind, groups = self.release_kind, self.clipping.groups
        given = {key: getattr(self, key) for key in ("max_grad_norm", "max_update_norm")}
        for key, value in {**given, "clipping.groups": groups}.items():
            bounds = key == kind.bound or (key == "clipping.groups" and kind.draws_batches)
            if value and not bounds:
                use = f"use {kind.bound}" if kind.bound else f"leave {key} out"
                raise ValueError(
                    f"{key} bounds nothing with unit: {self.unit} and mechanism: "
                    f"{self.mechanism.name}; {use}"
                )
        if kind.draws_batches and self.max_grad_norm is None and not groups:
            raise ValueError(
                "unit: example needs max_grad_norm, the L2 bound of what one example contributes"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_groups(self) -> Self:
        groups = self.clipping.groups
        if not groups:
            return self
        correlation = self.noise_correlation.name
        check_groups(groups, self.max_grad_norm, self.noise_multiplier, correlation)
        for name, entry in self.clients.items():
            for key in ("max_grad_norm", "noise_multiplier"):
                given = getattr(entry, key) is not None or key in entry.columns
                if given and (key == "max_grad_norm" or has_all_noise(groups)):
                    raise ValueError(
                        f"clients: {name!r} has a {key}, and that of every group is fixed by "
                        f"privacy.clipping.groups for all clients; remove {key}"
                    )
        return self

    @model_validator(mode="after")
    def _source_of_noise(self) -> Self:
        rho = self.accountant.target_rho
        if self.target_epsilon is None and not self.gives_noise and rho is None:
            raise ValueError(
                "needs target_epsilon, noise_multiplier or both, got neither; target_epsilon "
                "alone calibrates the noise for you"
            )
        of_clients = [key for entry in self.clients.values() for key in entry.noise_keys]
        common = ["target_epsilon"] * (self.target_epsilon is not None)
        common += ["noise_multiplier"] * self.gives_noise
        if rho is not None and (common or of_clients):
            where = common[0] if common else f"{of_clients[0]} of privacy.clients"
            raise ValueError(
                f"accountant.target_rho sets the noise of all clients, and so does {where}: keep "
                "one of them"
            )
        return self

    @model_validator(mode="after")
    def _budget_to_exhaust(self) -> Self:
        targets = [self.target_epsilon, *(entry.target_epsilon for entry in self.clients.values())]
        tables = any("target_epsilon" in entry.columns for entry in self.clients.values())
        if self.on_exhausted != "refuse" and not tables and targets == [None] * len(targets):
            raise ValueError(
                f"on_exhausted: {self.on_exhausted} needs a budget: give target_epsilon, for all "
                "or for some clients"
            )
        return self

    @model_validator(mode="after")
    def _sampling_with_a_guarantee(self) -> Self:
        scheme = SAMPLING_SCHEMES[self.sampling.name]
        if self.adjacency.name not in scheme.adjacencies:
            raise ValueError(scheme.refusal(self.adjacency.name))
        return self

    @model_validator(mode="after")
    def _correlation_with_a_guarantee(self) -> Self:
        if self.is_correlated:
            chosen = self.choices()
            needs = {
                key: (getattr(chosen, key), allowed)
                for key, allowed in CORRELATED[self.unit].items()
                if key not in ("correlation", "trust")  # the rules of trust models name that
            }
            kinds = CORRELATED[self.unit]["correlation"]
            if chosen.correlation not in kinds:
                raise ValueError(
                    f"noise_correlation {chosen.correlation} has no guarantee with unit: "
                    f"{self.unit}; use {' or '.join(kinds)}, or noise_correlation: none"
                )
            check_correlation_needs({**needs, "on_exhausted": (self.on_exhausted, ("refuse",))})
        return self
