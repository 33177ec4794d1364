"""Building of an experiment's model with its initial weights, and checks of model and loss."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim.core.errors import raised_as
from fedsim.core.formatting import dtype_text
from fedsim.core.plugins import plugin_calls, resolve, unknown_plugin
from fedsim.core.settings import Settings, first_mistake
from fedsim.core.streams import Purpose, stream_key, torch_seed
from fedsim.data.examples import Examples
from fedsim.models.adapters import add_adapters, fix_statistics, hint_of_names, matching, train_only
from fedsim.models.architectures import architecture
from fedsim.models.catalog import MODELS, ModelError
from fedsim.models.local_base import LocalBase
from fedsim.models.losses import PerExampleLoss, check_loss
from fedsim.models.settings import ModelSettings
from fedsim.models.tasks import Task, device_of, eval_mode


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Overwrite parameters and buffers of a model by the tensors of a safetensors file.

    Tensors are matched by name. Parameters and buffers that the file lacks, such as those of a new
    last layer, stay unchanged. The file must not hold tensors that the model lacks.

    Args:
        model: the model.
        path: the safetensors file; no code in it is executed.

    Raises:
        ModelError: the file cannot be read, or a tensor does not fit.
    """
    values = _read(path)
    state = model.state_dict()
    if not values:
        raise ModelError(f"model.init: {path} holds no tensors")
    for name, value in values.items():
        _check(name, value, state, path)
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(value)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training, so that they get no gradient, no noise and no update.

    Args:
        model: the model.
        patterns: shell patterns of parameter names, such as `features.*`.

    Raises:
        ModelError: a pattern matches no parameter, or all parameters are frozen.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in matching(patterns, named, "model.freeze", "parameter"):
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad and parameter.numel() for parameter in named.values()):
        raise ModelError(
            "model.freeze: all parameters of the model are frozen, so nothing is trained; remove a "
            "pattern"
        )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model.init: {path} cannot be read as safetensors: {reason}; write it with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error


def _check(name: str, value: Tensor, state: Mapping[str, Tensor], path: Path) -> None:
    if name not in state:
        hint = hint_of_names(name, state)
        raise ModelError(
            f"model.init: tensor {name!r} of {path} is not in the model{hint}; "
            "remove it from the file, or rename it"
        )
    expected = state[name]
    if value.shape != expected.shape:
        raise ModelError(
            f"model.init: tensor {name!r} of {path} has shape {tuple(value.shape)}, and the model "
            f"has {tuple(expected.shape)}"
        )
    if value.dtype != expected.dtype:
        raise ModelError(
            f"model.init: tensor {name!r} of {path} has type {dtype_text(value.dtype)}, and the "
            f"model has {dtype_text(expected.dtype)}; convert it before you save it"
        )
    if value.is_floating_point() and not value.isfinite().all():
        raise ModelError(f"model.init: tensor {name!r} of {path} holds NaN or infinity")


def build_model(
    settings: ModelSettings,
    *,
    input_shape: tuple[int, ...],
    num_outputs: int,
    seed: int,
    base: Path,
) -> nn.Module:
    """Return an experiment's model, with weights drawn from the seed or read from `model.init`.

    Args:
        settings: the section `model` of the experiment.
        input_shape: shape of one example; used by built-in models only.
        num_outputs: number of outputs per example (`Task.num_outputs`); used by built-in models
            only.
        seed: the experiment's seed; the same seed gives the same weights.
        base: the directory of the experiment file; paths are relative to it.

    Guarantees:
        The states of torch's global generators do not change.

    Raises:
        ModelError: there is no such model, it cannot be built, it is not an `nn.Module`, or it has
            no trainable parameters; the message is one line.
    """
    with _seed_torch(seed):
        if ":" in settings.name:
            model = _call(settings.name, settings.args, base)
        else:
            model = architecture(_built_in_args(settings), input_shape, num_outputs)
        _check_trainable(model, settings.name)
        _check_types(model.state_dict(), _SAVED_TYPES)
        if settings.init is not None:
            load_initial_weights(model, base / Path(settings.init).expanduser())
        model = _with_trained_part(model, settings)
    return model


def _with_trained_part(model: nn.Module, settings: ModelSettings) -> nn.Module:
    """Return the model after freezing parameters and adding adapters, as the settings say."""
    freeze(model, settings.freeze)
    if not settings.has_local_base:
        return model
    train_only(model, settings.train)
    if settings.lora is not None:
        model = add_adapters(model, settings.lora)
    fix_statistics(model)
    LocalBase(model).attach(model)
    return model


@contextmanager
def _seed_torch(seed: int) -> Iterator[None]:
    value = torch_seed(stream_key(seed, Purpose.MODEL))
    # Reading CUDA's generators would start CUDA, a cost for a process that does not use the GPU.
    # Before CUDA starts, nothing can have drawn from them.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(value)
        yield


def _built_in_args(settings: ModelSettings) -> Settings:
    entry = MODELS.get(settings.name)
    if entry is None:
        raise ModelError(unknown_plugin("model.name", "model", settings.name, MODELS))
    try:
        return entry.args.model_validate(settings.args)
    except ValidationError as error:
        mistake = first_mistake(error, "model", "args")
        raise ModelError(f"{mistake} (model {settings.name})") from error


def _call(reference: str, args: dict[str, Any], base: Path) -> nn.Module:
    with raised_as(ModelError):
        build = resolve(reference, base=base, setting="model.name")
    fix = "it is called with model.args and nothing else"
    with plugin_calls(f"model.name {reference!r}: failed", raises=ModelError, fix=fix):
        model = build(**args)
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"model.name {reference!r}: must return a torch.nn.Module, got {got}")
    return model


def _check_trainable(model: nn.Module, name: str) -> None:
    parameters = list(model.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise ModelError(
            f"model.name {name!r}: lazy layers have no weights to start from; "
            "give every layer its input size"
        )
    if not any(p.requires_grad and p.numel() for p in parameters):
        raise ModelError(
            f"model.name {name!r}: the model has no trainable parameters; "
            "at least one must have requires_grad"
        )


_NUM_CHECK_EXAMPLES = 3
_SENT_TYPES = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)
_SAVED_TYPES = _SENT_TYPES | {torch.complex64, torch.complex128}


def preflight(
    model: nn.Module,
    loss: PerExampleLoss,
    task: Task,
    examples: Examples,
    *,
    name: str = "model.loss",
) -> None:
    """Check a model's outputs, the targets and the losses, by a run on the first examples.

    The model runs in eval mode without gradients. Afterwards its training modes are restored.

    Args:
        model: the initial model.
        loss: the loss, which returns one value per example.
        task: the kind of prediction (`task_for`), which checks outputs and targets.
        examples: the examples. All targets are checked; the model runs on the first few examples.
        name: name of the loss in error messages.

    Raises:
        ModelError: a check failed; the message is one line with the shapes and the fix.
    """
    _check_types(model.state_dict(), _SENT_TYPES)
    task.check(examples.targets)
    few = examples.rows(np.arange(min(_NUM_CHECK_EXAMPLES, len(examples))))
    inputs, targets = torch.from_numpy(few.features), torch.from_numpy(few.targets)
    inputs, targets = inputs.to(device_of(model)), targets.to(device_of(model))
    with eval_mode(model), torch.no_grad():
        outputs = _outputs(model, inputs)
        _outputs(model, inputs[:1])
    task.check_outputs(outputs)
    check_loss(loss, outputs, targets, name=name)


def _check_types(state: Mapping[str, object], types: Collection[torch.dtype]) -> None:
    """Check that every value of a model's `state_dict` is a tensor of one of the given types."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dtype not in types:
            kind = dtype_text(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"{name!r} has type {kind}, which cannot be averaged or saved; keep parameters and "
                "buffers in float32, and run the forward pass under torch.autocast for arithmetic "
                "of other types"
            )


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    failure = f"the model failed on inputs of shape {tuple(inputs.shape)}"
    fix = f"build it for examples of shape {tuple(inputs.shape[1:])}"
    present, features = {dtype_text(p.dtype) for p in model.parameters()}, dtype_text(inputs.dtype)
    is_real = inputs.is_floating_point()
    if is_real and present - {features}:
        other = min(present - {features})
        fix = f"keep its parameters in {features}, the type of the features; they are {other}"
    elif is_real and any(isinstance(module, _EMBEDDINGS) for module in model.modules()):
        fix += ", and write data.features: tokens if these are indices of an embedding"
    with plugin_calls(failure, raises=ModelError, fix=fix):
        outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        raise ModelError(f"the model must return a tensor, got {type(outputs).__name__}")
    if outputs.ndim == 0 or len(outputs) != len(inputs):
        raise ModelError(
            f"the model's outputs must have one row per example, got shape {tuple(outputs.shape)} "
            f"for a batch of {len(inputs)}; do not squeeze() or flatten the batch"
        )
    if not outputs.is_floating_point():
        raise ModelError(f"the model's outputs must be real numbers, got {outputs.dtype}")
    if not outputs.isfinite().all():
        raise ModelError(
            "the initial model's outputs are not finite; scale the features or check the model"
        )
    return outputs
