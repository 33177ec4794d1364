"""DP-SGD with any torch optimizer: `PrivacyEngine`, with the interface of Opacus."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsim.accountant.events import Adjacency
from fedsim.clients.clipping.clipping import Clipping, NoiseAllocation
from fedsim.clients.model_checks.isolation import check_isolation
from fedsim.clients.privacy_engine.attachment import AttachedModel
from fedsim.clients.privacy_engine.batch_schedule import EngineStreams
from fedsim.clients.privacy_engine.loaders import PrivateLoader, loader_sizes, tensor_batches
from fedsim.clients.privacy_engine.opacus_names import (
    ATTRIBUTES,
    batch_and_population,
    without_opacus_arguments,
)
from fedsim.clients.privacy_engine.opacus_style import OpacusStyle
from fedsim.clients.privacy_engine.optimizer_patch import check_optimizer, patch_optimizer
from fedsim.clients.privacy_engine.row_losses import find_reduction
from fedsim.clients.privacy_engine.state import EngineSpending
from fedsim.clients.privacy_engine.steps import PrivateSteps
from fedsim.clients.privacy_engine.terms import (
    BatchSource,
    EngineSamplingName,
    LossReduction,
    check_physical_batch,
    mechanism_for,
    privacy_terms,
)

_OF_A_MODEL = ("terms", "_model", "_streams", "_steps")


class PrivacyEngine(EngineSpending, OpacusStyle):
    """DP-SGD engine, which makes an optimizer's steps differentially private for each example.

    After `attach`, call `engine.backward(losses)` with one loss for each example. For the
    unweighted mean or sum of a torch loss function, `loss.backward()` does the same
    (`fedsim.clients.privacy_engine.row_losses`). After any other `loss.backward()` the engine
    reports no ε until `check_isolation` has checked the loss. The backward pass gives no parameter
    a `.grad`. `optimizer.step()` clips the per-example gradients, sums them, adds noise once and
    divides by `batch_size`; the optimizer sees nothing else. `optimizer.virtual_step()` adds a
    physical batch to the logical batch without noise, so a logical batch may exceed memory.

    The first dimension of the model's input must be the examples. The first forward pass checks on
    synthetic examples, at the batch size that runs, that the model does not mix examples. After a
    change of modules or hooks, the check is repeated. Buffers must not change. Under
    `torch.autocast` only activations have lower precision, not norms, sums and noise.

    Guarantee: every step is in `ledger` before the optimizer updates the parameters. The parameters
    after any number of steps are (get_epsilon(δ), δ)-DP for every δ under `adjacency`, if an
    example's loss depends on that example only. Batches of `batches`, `private_loader` and
    `make_private` are sampled in the way that is charged. Each of their examples must pass through
    the backward pass once, or nothing is released. Batches of any other loader are charged without
    amplification by sampling, unless you declare `batches="poisson"`; no example may occur twice in
    a batch. A step without a backward pass is an empty batch, which releases pure noise and is
    charged. Noise does not depend on torch's global seed.

    The model runs on batches that are padded to a fixed, public number of rows. So the outputs of
    an example do not depend on how many others are in the batch
    (`fedsim.clients.gradients.padded_batches`). Arguments with one row for each example are cut
    into padded batches. All output tensors must have a row for each example.

    The guarantee does not cover the last bits of what the training loop computes from the outputs.
    A loss that is a mean over the batch divides by the number of examples. This may change the last
    bit of an example's gradient; `engine.backward` does not divide.

    `PrivacyEngine()` without a model waits for `make_private` (Opacus 1.x), which reads the sizes
    from the loader. The positional arguments are those of Opacus 0.x. Other arguments of Opacus are
    accepted if they describe what fedsim does anyway. Otherwise an error names the equivalent in
    fedsim (docs/start/from_opacus.md).

    Args:
        model: the model; parameters that are trainable now must stay trainable, and others frozen.
        batch_size: public expected batch size, by which every released sum is divided.
        sample_size: public number of examples; the sampling rate is batch_size / sample_size.
        alphas: Rényi orders of the accountant, which is then "rdp".
        noise_multiplier: standard deviation of the noise on the sum, divided by the clip norm. The
            value 0 gives no privacy.
        target_epsilon: alternative to `noise_multiplier`: the ε at `target_delta` after `steps` or
            `epochs`, one of which must be given. Further steps are refused.
        target_delta: δ of the calibration, and the default δ of `get_epsilon`.
        steps: number of steps for which the noise is calibrated.
        epochs: number of passes over the data for which noise is calibrated, instead of `steps`.
        max_grad_norm: the clip norm, an L2 norm; or a sequence with one clip norm for each layer or
            each trainable tensor; or any `Clipping`.
        noise_allocation: how the noise is divided among groups of parameters.
        sampling: "poisson", or "shuffle" for passes over shuffled data, without amplification. With
            "shuffle", call `begin_epoch` whenever your own loader starts again.
        loss_reduction: "mean" or "sum": how the loss reduces over the examples of a forward pass.
        accountant: the accountant of the reported ε: "pld" (Opacus's name "prv" works too), "rdp"
            or "moments". The default is "pld", or "rdp" with `alphas`.
        sample_rate: probability that an example is in a batch, in place of `batch_size` or
            `sample_size`.
        adjacency: which datasets are neighbours. Under "add_remove" the number of examples is
            private: `sample_size` must be a number that does not depend on it.
        max_physical_batch: largest physical batch that `batches` yields; `optimizer.step()` then
            updates the model only after the last physical batch of a logical batch.
        batches: "poisson" declares that a loader that the engine did not make draws each example
            independently with probability batch_size / sample_size. With "engine" its batches are
            charged without amplification, and refused if there is a target ε.
        augmentation_multiplicity: number K of views (changed copies) of each example. The model
            gets K successive rows for each example (`x.repeat_interleave(K, 0)`, then changed) in
            one forward pass. The mean of an example's K gradients is clipped, at the same ε (De et
            al. 2022, arXiv 2204.13650).
        seed: seed of sampling and noise; None for a seed from the operating system. Use a seed for
            simulations only: an adversary that knows it can subtract the noise. The same seed
            repeats the noise, so give each client and round its own seed (a `SeedSequence`), or
            continue with `load_state_dict`.
        secure_mode: whether noise is cryptographically secure and has no seed.
        secure_rng: name of `secure_mode` in Opacus 0.x.
        module: name of `model` in some versions of Opacus.
        opacus: other arguments of Opacus.

    Raises:
        ValueError: an argument is outside its range, or arguments contradict each other, or an
            argument of Opacus has another form in fedsim.
        TypeError: there is no such argument.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedsim.clients import PrivacyEngine
        >>> model = nn.Linear(4, 2)
        >>> engine = PrivacyEngine(
        ...     model, batch_size=10, sample_size=100, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> _ = engine.attach(optimizer)
        >>> x, y = torch.randn(100, 4), torch.zeros(100, dtype=torch.long)
        >>> for features, targets in engine.batches(x, y, steps=3):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(features), targets)
        ...     loss.backward()
        ...     _ = optimizer.step()
        >>> engine.steps, round(engine.get_epsilon(1e-3), 3)
        (3, 0.982)
        >>> engine.remaining(target_epsilon=8.0, delta=1e-3)
        241
    """

    _model: AttachedModel
    _undo: Callable[[], None] | None = None  # takes the patch of the optimizer back

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
        batches: BatchSource = "engine",
        augmentation_multiplicity: int = 1,
        seed: int | np.random.SeedSequence | None = None,
        secure_mode: bool = False,
        secure_rng: bool = False,
        module: nn.Module | None = None,
        **opacus: Any,
    ) -> None:
        if unknown := without_opacus_arguments(opacus):
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
            "accountant": accountant,
            "adjacency": adjacency,
            "max_physical_batch": max_physical_batch,
            "batches": batches,
            "augmentation_multiplicity": augmentation_multiplicity,
            "seed": seed,
            "secure_mode": secure_mode or secure_rng,
        }
        model = module if model is None else model
        if model is not None:
            batch, population = batch_and_population(batch_size, sample_size, sample_rate)
            self._set_up(model, batch, population, self._settings)
        elif not all(value is None for value in (batch_size, sample_size, sample_rate)):
            raise ValueError(
                "batch_size, sample_size and sample_rate need the model: PrivacyEngine(model, "
                "...); PrivacyEngine() reads them from the loader in make_private(...)"
            )

    def _set_up(
        self, model: nn.Module, batch_size: int, sample_size: int, settings: Mapping[str, Any]
    ) -> None:
        """Make the privacy terms and all parts of the engine for a model."""
        of_terms = dict(settings)
        max_grad_norm, allocation = of_terms.pop("max_grad_norm"), of_terms.pop("noise_allocation")
        seed, secure_mode = of_terms.pop("seed"), of_terms.pop("secure_mode")
        terms = privacy_terms(batch_size=batch_size, sample_size=sample_size, **of_terms)
        is_mean = terms.loss_reduction == "mean"
        attached = AttachedModel(model, terms.augmentation_multiplicity, is_mean=is_mean)
        mechanism = mechanism_for(terms, attached.parameters, max_grad_norm, allocation)
        attached.padded_examples = mechanism.padded_rows
        self.terms, self._model = terms, attached
        self._streams = EngineStreams(seed, secure=secure_mode, noisy=terms.noise_multiplier > 0.0)
        self._steps = PrivateSteps(attached, mechanism, terms, self._streams)

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            raise AttributeError(
                f"{name!r} of Opacus's PrivacyEngine is not supported; use instead: "
                f"{ATTRIBUTES[name]}"
            )
        if "terms" not in self.__dict__ and (name in _OF_A_MODEL or hasattr(type(self), name)):
            raise AttributeError(
                "this PrivacyEngine has no model yet: call engine.make_private(module=..., "
                "optimizer=..., data_loader=..., ...), or make PrivacyEngine(model, ...)"
            )
        raise AttributeError(f"PrivacyEngine has no attribute {name!r}")

    @property
    def max_physical_batch(self) -> int | None:
        """Largest physical batch; None without a limit. A new value drops an unfinished batch."""
        return self._steps.mechanism.max_physical_batch

    @max_physical_batch.setter
    def max_physical_batch(self, most: int | None) -> None:
        check_physical_batch(most)
        self._steps.split_batches(most)

    def attach(self, optimizer: Optimizer) -> Self:
        """Make the optimizer's steps private, and record the model's forward passes.

        The optimizer gets the attributes `virtual_step()` and `privacy_engine`. In a `with`
        statement, the engine detaches at the end of the block.

        Raises:
            ValueError: the optimizer does not have exactly the model's trainable parameters, or the
                engine, the model or the optimizer is already attached.
        """
        if self._undo is not None:
            raise ValueError("the engine is attached to an optimizer already; detach it first")
        if "privacy_engine" in optimizer.__dict__:
            raise ValueError("the optimizer has a privacy engine already; detach that first")
        self._check(optimizer)
        self._model.attach()
        self._undo = patch_optimizer(
            optimizer,
            step=partial(self._step, optimizer),
            virtual_step=self._steps.virtual_step,
            zero_grad=self._model.discard,
            owner=self,
        )
        return self

    def detach(self) -> None:
        """Restore the model and the optimizer, and drop the gradients of an unfinished batch."""
        if self._undo is not None:
            self._undo()
            self._model.detach()
        self._undo = None
        self._steps.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass through one loss for each example, instead of `loss.backward()`.

        Each per-example gradient is the gradient of one loss, so no reduction over the batch can
        scale it wrongly. A loss must depend on one example only.

        Args:
            losses: losses of the n examples (n,), as with reduction="none". With
                `augmentation_multiplicity`, losses of the rows (n · K,) or of the examples (n,).

        Raises:
            ValueError: the losses are not a vector.
        """
        self._model.backward(losses)

    def check_model(self, *args: Any, **kwargs: Any) -> None:
        """Check the model by a call with a few public examples, instead of synthetic ones.

        The first forward pass makes this check on synthetic examples of the same shape. Call this
        method if the model does not run on synthetic examples.

        Args:
            args: positional arguments of the model, with at least two different public examples.
            kwargs: keyword arguments of the model.

        Raises:
            UnsafeModelError: an example changes the output of another, or the model's buffers.
            UncoveredParameterError: a parameter has no per-example gradients.
        """
        self._model.check(args, kwargs, public=True)

    def check_isolation(
        self, loss: Callable[[Tensor, Tensor], Tensor], features: Tensor, targets: Tensor
    ) -> None:
        """Check on public examples that neither the model nor the loss mixes examples.

        A reduced loss must also be the mean or the sum, as `loss_reduction` says, for a batch of
        the planned size. After the check, the engine reports ε for steps with `loss.backward()` of
        this loss, also for earlier steps.

        Do not call `fedsim.clients.model_checks.isolation.check_isolation` on an attached
        model: its parameters get no gradients, so no mixing would be found.

        Args:
            loss: function of outputs and targets (n, ...) that returns one loss per example, or
                their mean or sum.
            features: features of at least 2 different public or synthetic examples (n, ...).
            targets: targets of these examples (n, ...), with all labels that the loss treats
                differently (such as classes with weights, or ignored labels).

        Raises:
            UnsafeModelError: an example's gradient depends on another example.
            ValueError: the loss has another reduction than `loss_reduction`.
        """
        terms = self.terms
        batch = min(terms.batch_size, terms.max_physical_batch or terms.batch_size)
        with self._model.paused():
            check_isolation(self._model.model, loss, features, targets)
            rows = batch * terms.augmentation_multiplicity
            reduction = find_reduction(self._model.model, loss, features, targets, rows)
        if reduction == "none":  # a loss for engine.backward needs no check
            return
        if reduction != terms.loss_reduction:
            raise ValueError(
                f"the loss is a {reduction} over the examples, and "
                f"loss_reduction={terms.loss_reduction!r} was declared, so gradients would be "
                "scaled by the size of the batch before clipping; pass "
                f"loss_reduction={reduction!r}"
            )
        self._steps.losses.is_checked = True

    def batches(self, *tensors: Tensor, steps: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches sampled from examples in memory; call `optimizer.step()` once for each.

        With `max_physical_batch` the iterator yields physical batches: `optimizer.step()` adds
        each to the logical batch and updates the model at the last one. A batch may be empty, and
        needs an `optimizer.step()` too. With sampling="shuffle", row i must be the same example in
        all calls that share a pass over the data.

        Args:
            tensors: features, targets and so on, each with the n examples as rows (n, ...).
            steps: number of logical batches. None stands for all remaining calibrated steps, or,
                without a calibration, for one pass over the data.

        Raises:
            ValueError: the tensors differ in length.
        """
        if len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors must share one length, got {[len(t) for t in tensors]}")
        planned = self.terms.planned_steps
        if steps is None:
            steps = self.terms.batches_per_epoch if planned is None else planned - self.steps
        return tensor_batches(self._steps.feed, tensors, steps)

    def private_loader(self, loader: DataLoader[Any]) -> PrivateLoader:
        """Return a loader of the same dataset whose batches are sampled in the way that is charged.

        Raises:
            ValueError: the loader cannot be replaced; `loader_sizes` lists the reasons.
        """
        loader_sizes(loader)
        return PrivateLoader(loader, self._steps.feed, self.terms.batches_per_epoch, self)

    def begin_epoch(self) -> None:
        """Announce that a loader that the engine did not make starts a pass over shuffled data.

        Call this method only with sampling="shuffle".

        Raises:
            EpochError: the sampling is not "shuffle".
        """
        self._steps.schedule.begin_epoch()

    def _step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        self._check(optimizer)
        return self._steps.step(update)

    def _check(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer, self._model.model, self._model.parameters)
