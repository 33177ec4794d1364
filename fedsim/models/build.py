"""The built-in models, building of an experiment's model, and checks of model and loss.

No built-in model has BatchNorm, because BatchNorm mixes the examples of a batch, so that no
per-example gradient exists. None has dropout, which draws from torch's global generator.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim.core.errors import one_line, raised_as
from fedsim.core.formatting import dtype_text
from fedsim.core.limits import MAX_PARAMETERS
from fedsim.core.plugins import plugin_calls, resolve, unknown_plugin
from fedsim.core.settings import Settings, first_mistake
from fedsim.core.streams import Purpose, stream_key, torch_seed
from fedsim.data.examples import Examples
from fedsim.models.adapters import add_adapters, fix_statistics, hint_of_names, matching, train_only
from fedsim.models.catalog import MODELS, CnnArgs, LogisticArgs, MlpArgs, ModelError
from fedsim.models.local_base import LocalBase
from fedsim.models.losses import PerExampleLoss, check_loss
from fedsim.models.settings import ModelSettings
from fedsim.models.tasks import Task, device_of, eval_mode

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def architecture(args: Settings, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return the built-in model that the setting `model.args` describes.

    The model maps (batch, *input_shape) to (batch, num_outputs).

    Args:
        args: the setting `model.args`; its class selects the model.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.

    Raises:
        ModelError: the model does not accept inputs of that shape, or has more than
            `MAX_PARAMETERS` trained values.
    """
    build = _BUILT_IN[type(args)]
    with torch.device("meta"):  # shapes without memory
        values = sum(value.numel() for value in build(args, input_shape, num_outputs).parameters())
    if values > MAX_PARAMETERS:
        raise ModelError(
            f"model.args: a model of {values:,} trained values for inputs of shape {input_shape} "
            f"and {num_outputs:,} outputs; built-in models have at most {MAX_PARAMETERS:,}: use "
            "smaller layers, fewer classes or a model of your own"
        )
    return build(args, input_shape, num_outputs)


def logistic(args: LogisticArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of one linear layer on the flattened input.

    Args:
        args: the setting `model.args` of model `logistic`.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.
    """
    layer = nn.Linear(prod(input_shape), num_outputs, bias=args.bias)
    if args.init == "zeros":
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(args: MlpArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of fully connected layers on the flattened input.

    Args:
        args: the setting `model.args` of model `mlp`.
        input_shape: shape of one example.
        num_outputs: number of outputs per example.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(input_shape)
    for hidden in args.hidden:
        layers += [nn.Linear(width, hidden), _ACTIVATIONS[args.activation]()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_outputs))


def cnn(args: CnnArgs, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Return a model of 3 x 3 convolutions with group norm and pooling, then one hidden layer.

    Args:
        args: the setting `model.args` of model `cnn`.
        input_shape: shape of one example, (channels, height, width) in pixels.
        num_outputs: number of outputs per example.

    Raises:
        ModelError: the input shape does not have three dimensions.
    """
    if len(input_shape) != 3:
        raise ModelError(
            "model.name: cnn takes images of shape (channels, height, width), got examples of "
            f"shape {input_shape}; {_fix(input_shape)}, or use mlp"
        )
    activation = _ACTIVATIONS[args.activation]
    width, height_px, width_px = input_shape
    layers: list[nn.Module] = []
    for channels in args.channels:
        layers += [
            nn.Conv2d(width, channels, kernel_size=3, padding=1),
            nn.GroupNorm(_groups(channels), channels),
            activation(),
        ]
        width = channels
        # Pooling stops at 2 x 2: group norm of a single pixel would leave little of the image.
        if min(height_px, width_px) >= 4:
            layers.append(nn.MaxPool2d(2))
            height_px, width_px = height_px // 2, width_px // 2
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(width * height_px * width_px, args.hidden),
        activation(),
        nn.Linear(args.hidden, num_outputs),
    )


def _fix(input_shape: tuple[int, ...]) -> str:
    grey = "write data.images: {channels: none} if they are grey images"
    return grey if len(input_shape) == 2 else "give features (n, channels, height, width)"


def _groups(channels: int) -> int:
    """Return the largest number, at most 8, of equal groups with 4 or more channels each."""
    return max(n for n in range(1, max(1, min(8, channels // 4)) + 1) if channels % n == 0)


_BUILT_IN: Mapping[type[Settings], Callable[[Any, tuple[int, ...], int], nn.Module]] = {
    LogisticArgs: logistic,
    MlpArgs: mlp,
    CnnArgs: cnn,
}


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
        raise ModelError(
            f"model.init: {path} cannot be read as safetensors: {one_line(error)}; write it with "
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
    if settings.freeze:
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
    others = {parameter.dtype for parameter in model.parameters()} - {inputs.dtype}
    is_real = inputs.is_floating_point()
    if is_real and others:
        features, other = dtype_text(inputs.dtype), min(map(dtype_text, others))
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
