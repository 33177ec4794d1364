"""DP-SGD behind any torch optimizer: the facade that Opacus users know.

Example::

    engine = PrivacyEngine(model, batch_size=32, sample_size=1000, noise_multiplier=1.1)
    engine.attach(optimizer)
    for x, y in engine.batches(features, targets, steps=100):
        optimizer.zero_grad()
        engine.backward(loss(model(x), y))  # one value per example: reduction="none"
        optimizer.step()
    epsilon, best_alpha = engine.get_privacy_spent(delta=1e-5)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsim.accountant import Event, PrivacyLedger
from fedsim.accountant.events import Adjacency
from fedsim.clients.clipping.clipping import Clipping
from fedsim.clients.gradients.per_example import LotStatistics
from fedsim.clients.mechanisms.dp_sgd.mechanism import DpSgdMechanism
from fedsim.clients.mechanisms.dp_sgd.noise_allocation import NoiseAllocation
from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.privacy_engine.attachment import AttachedModel
from fedsim.clients.privacy_engine.loaders import PrivateLoader, loader_sizes, tensor_batches
from fedsim.clients.privacy_engine.lot_schedule import EngineStreams
from fedsim.clients.privacy_engine.opacus_names import (
    accountant_name,
    attribute_hint,
    lot_and_population,
    without_opacus_arguments,
)
from fedsim.clients.privacy_engine.opacus_style import OpacusStyle
from fedsim.clients.privacy_engine.optimizer_patch import OptimizerPatch, check_optimizer
from fedsim.clients.privacy_engine.row_losses import find_reduction
from fedsim.clients.privacy_engine.state import (
    affordable_events,
    engine_state,
    ledger_spent,
    restore_state,
)
from fedsim.clients.privacy_engine.steps import PrivateSteps
from fedsim.clients.privacy_engine.terms import (
    EngineSamplingName,
    LossReduction,
    LotSource,
    PrivacyTerms,
    checked_count,
    clipping_for,
    privacy_terms,
)

_OF_A_MODEL = ("terms", "_model", "_streams", "_steps")


class PrivacyEngine(OpacusStyle):
    """Makes an optimizer's steps differentially private per example.

    After `attach`, `engine.backward(losses)` takes one loss for each example. `loss.backward()`
    does the same for a mean or sum of a loss function of torch of the model's outputs, without
    weights (`fedsim.clients.privacy_engine.row_losses`). After any other `loss.backward()` no ε is
    printed until `check_isolation` has seen the loss. No parameter gets a `.grad`.
    `optimizer.step()` clips the per-example gradients, sums them, adds noise once and divides by
    `batch_size`; the optimizer sees nothing else. `optimizer.virtual_step()` adds a physical batch
    to the lot without noise, so that a lot may exceed memory. The first dimension of the model's
    input is the examples. The first forward pass, and the first one after modules or hooks were
    exchanged, checks on synthetic examples that the model does not couple them, in lots of the
    size that runs. Buffers may not change. Under `torch.autocast` activations are short; norms,
    sums and noise are not.

    Guarantee: every step is in `ledger` before the optimizer moves, and the parameters after any
    number of steps are (get_epsilon(δ), δ)-DP for every δ under `adjacency`, if an example's loss
    depends on that example alone. Lots of `batches`, `private_loader` and `make_private` are drawn
    as they are charged, and each of their examples comes through backward passes once, or nothing
    is released. Lots of a loader of your own are charged without amplification by sampling, unless
    you declare `lots="poisson"`; no example may occur twice in one. A step without a backward pass
    is an empty lot: pure noise, and charged. Noise does not depend on torch's global seed.

    The model runs in tiles of a fixed, public number of rows, filled up with zeros, so the outputs
    of an example do not depend on how many others are in the lot
    (`fedsim.clients.gradients.tiles`). Tensors among its arguments whose first dimension is that of
    the examples are cut into tiles; all tensors among its outputs must have a row for each example.

    Not guaranteed: the last bits of what your own code computes from the outputs. A loss that is a
    mean over the lot divides by the number of examples, which may round an example's gradient by
    one unit in the last place; `engine.backward` divides by nothing.

    `PrivacyEngine()` without a model waits for `make_private` (Opacus 1.x), which reads the sizes
    from the loader. The positional arguments are those of the first Opacus. Other arguments of
    Opacus are accepted where they ask for what happens here anyway, and refused with their place
    here otherwise (docs/start/from_opacus.md).

    Args:
        model: the model; which of its parameters are trainable is fixed from now on.
        batch_size: expected lot: public, and the divisor of every released sum.
        sample_size: public number of examples; the sampling rate is batch_size / sample_size.
        alphas: Rényi orders of the accountant, which is then "rdp".
        noise_multiplier: z; noise on the sum has standard deviation z · C. 0: no privacy.
        target_epsilon: instead of z: the ε at `target_delta` after `steps` or `epochs`, which must
            be given; further steps are refused.
        target_delta: δ of the calibration, and the default of `get_epsilon`.
        steps: number of steps to calibrate for.
        epochs: number of passes to calibrate for, instead of `steps`.
        max_grad_norm: C; a sequence is one bound for each layer or each trainable tensor; or any
            `Clipping`.
        noise_allocation: how groups share the noise.
        sampling: "poisson", or "shuffle" for passes over shuffled data (no amplification; call
            `begin_epoch` whenever a loader of your own starts again).
        loss_reduction: "mean" or "sum", what the loss does over the examples of a forward pass.
        accountant: the accountant of the reported ε: "pld" (also by Opacus's name "prv"), "rdp" or
            "moments". By default "pld", and "rdp" with `alphas`.
        sample_rate: instead of `batch_size` or `sample_size`: the probability of each example to be
            in a lot.
        adjacency: what ε protects against. Under "add_remove" the number of examples is private:
            `sample_size` must be a number that does not depend on it.
        max_physical_batch: most examples that `batches` yields at once; `optimizer.step()` then
            waits for the last part of a lot.
        lots: of loaders of your own, with sampling="poisson": "poisson" declares that yours draws
            each example independently with probability batch_size / sample_size. Undeclared, such
            lots are charged without amplification, and refused where a target is set.
        augmentations: K, the views of each example: the model gets K rows for each example, side by
            side (`x.repeat_interleave(K, 0)`, each then changed), in one forward pass. The mean of
            an example's K gradients is clipped, at the same ε (De et al. 2022, arXiv 2204.13650).
        seed: of sampling and noise; None draws it from the operating system. Simulation grade: who
            knows the seed can subtract the noise, and the same seed gives the same noise again, so
            give each client and round its own (a `SeedSequence`), or go on with `load_state_dict`.
        secure_mode: cryptographic noise, without a seed.
        secure_rng: its name in the first Opacus.
        module: name of `model` in some versions of Opacus.
        opacus: other arguments of Opacus.

    Raises:
        ValueError: an argument is outside its range, or arguments contradict each other, or an
            argument of Opacus has another place here.
        TypeError: there is no such argument.
    """

    terms: PrivacyTerms
    _model: AttachedModel
    _streams: EngineStreams
    _steps: PrivateSteps
    _patch: OptimizerPatch | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        batch_size: int | None = None,
        sample_size: int | None = None,
        alphas: Sequence[float] | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | Sequence[float] | Clipping = 1.0,
        *,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        steps: int | None = None,
        epochs: float | None = None,
        sample_rate: float | None = None,
        noise_allocation: NoiseAllocation = "uniform",
        sampling: EngineSamplingName = "poisson",
        loss_reduction: LossReduction = "mean",
        accountant: str | None = None,
        adjacency: Adjacency = "zero_out",
        max_physical_batch: int | None = None,
        lots: LotSource = "engine",
        augmentations: int = 1,
        seed: int | np.random.SeedSequence | None = None,
        secure_mode: bool = False,
        secure_rng: bool = False,
        module: nn.Module | None = None,
        **opacus: Any,
    ) -> None:
        unknown = without_opacus_arguments(opacus)
        if unknown:
            raise TypeError(f"PrivacyEngine has no argument {sorted(unknown)[0]!r}")
        self._settings: dict[str, Any] = {
            "alphas": alphas,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "steps": steps,
            "epochs": epochs,
            "noise_allocation": noise_allocation,
            "sampling": sampling,
            "loss_reduction": loss_reduction,
            "accountant": None if accountant is None else accountant_name(accountant),
            "adjacency": adjacency,
            "max_physical_batch": max_physical_batch,
            "lots": lots,
            "augmentations": augmentations,
            "seed": seed,
            "secure_mode": secure_mode or secure_rng,
        }
        model = module if model is None else model
        if model is not None:
            lot, population = lot_and_population(batch_size, sample_size, sample_rate)
            self._set_up(model, lot, population, self._settings)
        elif not all(value is None for value in (batch_size, sample_size, sample_rate)):
            raise ValueError(
                "batch_size, sample_size and sample_rate need the model: PrivacyEngine(model, "
                "...); PrivacyEngine() reads them from the loader in make_private(...)"
            )

    def _set_up(
        self, model: nn.Module, batch_size: int, sample_size: int, settings: Mapping[str, Any]
    ) -> None:
        """Fix the terms, and make the engine of a model."""
        of_terms = dict(settings)
        max_grad_norm, allocation = of_terms.pop("max_grad_norm"), of_terms.pop("noise_allocation")
        seed, secure_mode = of_terms.pop("seed"), of_terms.pop("secure_mode")
        terms = privacy_terms(batch_size=batch_size, sample_size=sample_size, **of_terms)
        attached = AttachedModel(model, terms.augmentations)
        parameters, noise = attached.parameters, terms.noise_multiplier
        mechanism = DpSgdMechanism(
            sampling=terms.sampling,
            clipping=clipping_for(max_grad_norm, parameters, noisy=noise > 0.0),
            noise_multiplier=noise,
            expected_lot=float(terms.batch_size),
            allocation=allocation,
            max_physical_batch=terms.max_physical_batch,
            largest_lot=terms.sample_size,
        ).for_model(parameters)
        if terms.target_epsilon is not None:
            mechanism = mechanism.with_effective_noise(noise)
        attached.tile_examples = mechanism.tile_rows
        self.terms, self._model = terms, attached
        self._streams = EngineStreams(seed, secure=secure_mode, noisy=noise > 0.0)
        self._steps = PrivateSteps(attached, mechanism, terms, self._streams)

    def __getattr__(self, name: str) -> Any:
        hint = attribute_hint(name)
        if hint is not None:
            raise AttributeError(
                f"{name!r} of Opacus's PrivacyEngine has another place here: {hint}"
            )
        if "terms" not in self.__dict__ and (name in _OF_A_MODEL or hasattr(type(self), name)):
            raise AttributeError(
                "this PrivacyEngine has no model yet: call engine.make_private(module=..., "
                "optimizer=..., data_loader=..., ...), or make PrivacyEngine(model, ...)"
            )
        raise AttributeError(f"PrivacyEngine has no attribute {name!r}")

    @property
    def steps(self) -> int:
        """Steps taken, empty lots included."""
        return self._steps.schedule.steps

    @property
    def ledger(self) -> PrivacyLedger:
        """A copy of everything charged."""
        return PrivacyLedger().merge(self._steps.ledger)

    @property
    def event(self) -> Event:
        """The event of a step, or of a pass with sampling="shuffle"."""
        return self._steps.mechanism.event

    @property
    def private_statistics(self) -> LotStatistics | None:
        """Counts of the last lot's examples. Private: must not leave the client."""
        return self._steps.private_statistics

    @property
    def noise_multiplier(self) -> float:
        """z, as given or calibrated; `event` has the effective one (docs/explain/proofs.md)."""
        return self._steps.mechanism.noise_multiplier

    @property
    def max_physical_batch(self) -> int | None:
        """Most examples in a forward pass; None without a limit. A change drops an open lot."""
        return self._steps.mechanism.max_physical_batch

    @max_physical_batch.setter
    def max_physical_batch(self, most: int | None) -> None:
        if most is not None:
            checked_count("max_physical_batch", most, "the most examples in a forward pass")
        self._steps.split_lots(most)

    def attach(self, optimizer: Optimizer) -> Self:
        """Make the optimizer's steps private, and record the model's forward passes.

        Adds `optimizer.virtual_step()` and `optimizer.privacy_engine`. Use it as a context manager
        to detach at the end.

        Raises:
            ValueError: the optimizer does not hold exactly the model's trainable parameters, or the
                engine, the model or the optimizer is attached already.
        """
        if self._patch is not None:
            raise ValueError("the engine is attached to an optimizer already; detach it first")
        if "privacy_engine" in optimizer.__dict__:
            raise ValueError("the optimizer has a privacy engine already; detach that first")
        self._check(optimizer)
        self._model.attach()
        self._patch = OptimizerPatch(
            optimizer,
            step=self._step,
            virtual_step=self._steps.virtual_step,
            zero_grad=self._model.discard,
            owner=self,
        )
        return self

    def detach(self) -> None:
        """Restore model and optimizer; an open lot is dropped."""
        if self._patch is not None:
            self._patch.undo()
            self._model.detach()
        self._patch = None
        self._steps.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def backward(self, losses: Tensor) -> None:
        """Run backward through one loss for each example, in place of `loss.backward()`.

        No reduction can be wrong: each example's gradient is that of its own loss, and the number
        of examples enters nowhere. A loss must depend on its own example alone.

        Args:
            losses: (n,), as with reduction="none". With `augmentations` (n · K,), one for each row,
                or (n,), one for each example.

        Raises:
            ValueError: the losses are not a vector.
        """
        self._model.backward(losses)

    def check_model(self, *args: Any, **kwargs: Any) -> None:
        """Check the model with a call on a few public examples, instead of synthetic ones.

        The first forward pass does this on synthetic examples of the same shape. Call it for a
        model that does not run on those.

        Args:
            args: arguments of the model, with at least two different public examples.
            kwargs: likewise.

        Raises:
            UnsafeModelError: an example reaches another's output, or the model's buffers.
            UncoveredParameterError: a parameter has no per-example gradients.
        """
        self._model.check(args, kwargs, public=True)

    def check_isolation(
        self, loss: Callable[[Tensor, Tensor], Tensor], features: Tensor, targets: Tensor
    ) -> None:
        """Check on public examples that model and loss do not couple examples.

        A loss of one value must also be what `loss_reduction` says, for a lot of the planned size.
        After that, ε is known for training with `loss.backward()` of this loss, before or later.

        Do not call `fedsim.clients.model_checks.isolation.check_isolation` on an attached
        model: its parameters get no gradients, so no coupling would be found.

        Args:
            loss: from outputs and targets (n, ...) to one loss per example, or their mean or sum.
            features: at least 2 public or synthetic examples that differ.
            targets: their targets, with all labels that the loss treats apart (rare classes with
                weights, ignored ones).

        Raises:
            UnsafeModelError: an example's gradient depends on another example.
            ValueError: the loss has another reduction than `loss_reduction`.
        """
        terms = self.terms
        lot = min(terms.batch_size, terms.max_physical_batch or terms.batch_size)
        with self._model.paused():
            check_isolation(self._model.model, loss, features, targets)
            found = find_reduction(
                self._model.model, loss, features, targets, lot * terms.augmentations
            )
        if found == "none":  # a loss for engine.backward, which needs no check
            return
        if found != terms.loss_reduction:
            raise ValueError(
                f"the loss is a {found} over the examples, and loss_reduction="
                f"{terms.loss_reduction!r} was declared, so gradients would be scaled by the size "
                f"of the lot before the clip; pass loss_reduction={found!r}"
            )
        self._steps.losses.is_checked = True

    def batches(self, *tensors: Tensor, steps: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Return lots drawn from examples in memory; call `optimizer.step()` once for each.

        With `max_physical_batch` a lot has several parts: `optimizer.step()` adds each part to the
        lot and updates the model at the last one. A lot may be empty; it must be released, too.

        Args:
            tensors: features, targets and so on, (n, ...) each.
            steps: number of lots; by default the remaining steps of the calibration, or one pass.

        Raises:
            ValueError: the tensors differ in length.
        """
        planned = self.terms.planned_steps
        if steps is None:
            steps = self.terms.lots_per_epoch if planned is None else planned - self.steps
        return tensor_batches(self._steps.feed, tensors, steps)

    def private_loader(self, loader: DataLoader[Any]) -> PrivateLoader:
        """Return a loader of the same dataset that draws lots as the account claims.

        Raises:
            ValueError: the loader cannot be replaced.
        """
        loader_sizes(loader)
        return PrivateLoader(loader, self._steps.feed, self.terms.lots_per_epoch, self)

    def begin_epoch(self) -> None:
        """Start a pass of a loader of your own (sampling="shuffle" only).

        Raises:
            EpochError: the sampling has no passes.
        """
        self._steps.schedule.begin_epoch()

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return ε of all charges at δ, by default at `target_delta`.

        Raises:
            NotPoissonError: lots from outside were not Poisson samples, so the account is void.
            UncheckedLossError: `loss.backward()` ran, and `check_isolation` has not covered it.
            ValueError: δ is not in (0, 1).
        """
        return self.get_privacy_spent(delta)[0]

    def get_privacy_spent(self, delta: float | None = None) -> tuple[float, float | None]:
        """Return (ε, best α): the accountant's ε, and the Rényi order that it comes from.

        The order is None where the accountant has none: with "pld", where nothing was charged, and
        where ε is infinite.

        Raises:
            NotPoissonError: lots from outside were not Poisson samples, so the account is void.
            UncheckedLossError: `loss.backward()` ran, and `check_isolation` has not covered it.
            ValueError: δ is not in (0, 1).
        """
        self._check_claims()
        spent = ledger_spent(self._steps.ledger, self.terms, delta)
        return spent.epsilon, spent.best_order

    def remaining(self, target_epsilon: float, delta: float | None = None) -> int:
        """Return the number of further steps that keep ε at δ within `target_epsilon`.

        It is at most the number of remaining calibrated steps. 10^12 or more means any number. The
        steps are on lots of the engine, or on lots from outside once there was one.

        Args:
            target_epsilon: the budget.
            delta: δ; None: `target_delta`.
        """
        self._check_claims()
        terms, ledger = self.terms, self._steps.ledger
        mechanism, outside = self._steps.mechanism, self._steps.schedule.outside
        event = mechanism.event if outside.are_amplified else mechanism.mechanism
        events = affordable_events(ledger, terms, event, target_epsilon, delta)
        if events is None:
            return 0
        steps = events * (terms.lots_per_epoch if terms.by_epoch else 1)
        steps += self._steps.schedule.steps_paid
        return (
            steps if terms.planned_steps is None else min(steps, terms.planned_steps - self.steps)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: ledger, counters and positions of all streams.

        It holds plain values that JSON can store. It includes the seed if there is one, with which
        anyone can subtract the noise: keep it as private as the data.

        Raises:
            RuntimeError: a lot is open; its sum has no noise yet.
        """
        return engine_state(self._steps, self._streams, self.terms)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the `state_dict` of an engine with the same arguments.

        Guarantee: with a seed, all further steps are those of that engine, bit for bit. No charge
        of this engine is lost.

        Raises:
            ValueError: the state is of another kind, or this engine has charges that it lacks.
        """
        restore_state(state, self._steps, self._streams, self.terms)

    def _check_claims(self) -> None:
        self._steps.schedule.outside.check_claim()
        self._steps.losses.require()

    def _step(self, update: Callable[[], Any]) -> Any:
        if self._patch is not None:
            self._check(self._patch.optimizer)
        return self._steps.step(update)

    def _check(self, optimizer: Optimizer) -> None:
        parameters = self._model.parameters
        check_optimizer(optimizer, self._model.model, parameters.names, parameters.tensors)
