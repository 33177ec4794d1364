"""Arguments and attributes of Opacus, and their equivalents in fedsim."""

import math
from collections.abc import Mapping
from typing import Any

_ADAPTIVE = (
    "pass max_grad_norm=AdaptiveClipping.for_batch(batch_size, max_grad_norm=..., quantile=..., "
    "learning_rate=...) of fedsim.clients.clipping.adaptive"
)
ARGUMENTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "batch_first": (
        (True,),
        "put the examples in the first dimension of the model's input and outputs",
    ),
    "clip_per_layer": ((False,), "give max_grad_norm a list, with one bound for each layer"),
    "clipbound_learning_rate": ((), _ADAPTIVE),
    "clipping": (
        ("flat",),
        "give max_grad_norm a list of bounds for clipping by layer, or "
        "AdaptiveClipping.for_batch(batch_size, max_grad_norm=...) of "
        "fedsim.clients.clipping.adaptive for an adaptive bound",
    ),
    "distributed": ((False,), "train in one process"),
    "enable_stat": (
        (False,),
        "read engine.private_statistics, which must not leave the client",
    ),
    "experimental": ((), "leave it out"),
    "grad_norm_type": ((2, 2.0), "only the L2 norm has an accountant"),
    "grad_sample_mode": (
        ("hooks", "functorch", "ew", "ghost"),
        "leave it out: the engine chooses how per-example gradients are computed",
    ),
    "max_clipbound": ((), _ADAPTIVE),
    "min_clipbound": ((), _ADAPTIVE),
    "n_accumulation_steps": ((), "pass max_physical_batch=..., or call optimizer.virtual_step()"),
    "noise_generator": (
        (None,),
        "pass seed=..., or secure_mode=True for noise that nobody can repeat",
    ),
    "rand_on_empty": (
        (False,),
        "an empty batch is a step of pure noise; call optimizer.step() for it, too",
    ),
    "target_unclipped_quantile": ((), _ADAPTIVE),
    "unclipped_num_std": ((), _ADAPTIVE),
    "wrap_model": ((True, False), "leave it out: the model is the same object, attached"),
}
"""Arguments of Opacus: the values that fedsim accepts, without any effect, and advice on others.

The accepted values describe what fedsim does anyway.
"""
ATTRIBUTES: Mapping[str, str] = {
    "alphas": "pass alphas= to PrivacyEngine; engine.get_privacy_spent(delta) returns the best one",
    "clipper": "engine.backward and loss.backward() keep per-example gradients inside the engine",
    "dataset": "the loader that make_private returned",
    "disable_hooks": "engine.detach(), and engine.attach(optimizer) to go on",
    "enable_hooks": "engine.attach(optimizer)",
    "expected_batch_size": "engine.terms.batch_size",
    "get_compatible_module": "ModuleValidator.fix(model) of fedsim.clients",
    "get_renyi_divergence": "RdpAccountant().compose(engine.event).rdp() of fedsim.accountant",
    "is_compatible": "ModuleValidator.is_valid(model) of fedsim.clients",
    "load_checkpoint": "engine.load_state_dict(state['engine']), model.load_state_dict(...) and "
    "optimizer.load_state_dict(...), in a new engine",
    "max_grad_norm": "engine.terms has the public terms, engine.state_dict() an adapted bound",
    "sample_rate": "engine.terms.sampling.rate",
    "save_checkpoint": "torch.save({'model': model.state_dict(), 'optimizer': "
    "optimizer.state_dict(), 'engine': engine.state_dict()}, path); keep it as private as the data",
    "set_alphas": "pass alphas= to PrivacyEngine",
    "to": "leave it out: the engine works where the model is",
    "validate": "ModuleValidator.validate(model) of fedsim.clients",
    "virtual_step": "optimizer.virtual_step()",
}


def without_opacus_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, without those of Opacus that ask for what fedsim does anyway.

    Unknown names are kept; the engine refuses them later.

    Args:
        settings: arguments by name.

    Raises:
        ValueError: an argument of Opacus has another form in fedsim; the message names it.
    """
    for name, value in settings.items():
        accepted, instead = ARGUMENTS.get(name, ((value,), ""))
        if not any(value is good or value == good for good in accepted):
            raise ValueError(f"{name}={value!r} of Opacus is not supported; {instead}")
    return {name: value for name, value in settings.items() if name not in ARGUMENTS}


def accountant_name(name: Any) -> Any:
    """Return fedsim's name for one of Opacus's accountants, and any other value unchanged.

    Raises:
        ValueError: the accountant is "gdp", which gives no bound on ε.
    """
    if name == "gdp":
        raise ValueError(
            "accountant='gdp' is a limit theorem, whose ε may be too small: it is no guarantee; "
            "use accountant='pld', which is as tight as Opacus's 'prv'"
        )
    return "pld" if name == "prv" else name


def batch_and_population(
    batch_size: int | None, sample_size: int | None, sample_rate: float | None
) -> tuple[int, int]:
    """Return the expected batch size and the public number of examples.

    Two of the three arguments must be given. Rounding never makes the charged rate batch_size /
    sample_size smaller than a given rate.

    Args:
        batch_size: expected batch size, or None.
        sample_size: public number of examples, or None.
        sample_rate: probability that an example is in a batch, or None.

    Raises:
        ValueError: fewer than two numbers are given, or the three contradict each other.
    """
    if sample_rate is not None and not 0.0 < sample_rate <= 1.0:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate!r}")
    if batch_size is not None and sample_size is not None:
        if sample_rate is not None and not math.isclose(
            sample_rate, batch_size / sample_size, rel_tol=1e-6
        ):
            raise ValueError(
                f"sample_rate={sample_rate:g} is not batch_size / sample_size = {batch_size} / "
                f"{sample_size}; leave one of the three out"
            )
        return batch_size, sample_size
    if sample_rate is not None and sample_size is not None:
        return max(1, math.ceil(sample_rate * sample_size * (1 - 1e-9))), sample_size
    if sample_rate is not None and batch_size is not None:
        return batch_size, max(batch_size, math.floor(batch_size / sample_rate * (1 + 1e-9)))
    given = f"sample_rate={sample_rate:g} alone" if sample_rate is not None else "the model alone"
    raise ValueError(
        f"{given} does not say how large batches and data are: add sample_size=len(dataset), the "
        "public number of examples, and batch_size (or sample_rate); or call "
        "PrivacyEngine().make_private(module=..., optimizer=..., data_loader=...), which reads "
        "them from the loader"
    )


class NoGradSample:
    """Placeholder for Opacus's `grad_sample` attribute: reading it raises an error with a hint.

    A pickle or copy of the placeholder is None.
    """

    def __getattr__(self, name: str) -> object:
        raise AttributeError(self._hint)

    def __len__(self) -> int:
        raise TypeError(self._hint)

    def __getitem__(self, place: object) -> object:
        raise TypeError(self._hint)

    def __repr__(self) -> str:
        return f"NoGradSample({self._hint})"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    _hint = (
        "'grad_sample' of Opacus is not supported: per-example gradients are clipped and summed "
        "inside the engine, and p.grad is the noisy sum after optimizer.step(); counts of the "
        "batch are in engine.private_statistics, which must not leave the client"
    )
