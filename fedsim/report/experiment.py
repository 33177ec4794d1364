"""The report's box "Experiment", which shows settings and sizes of a run in a few lines."""

from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.core.formatting import count_text, range_text, shortened
from fedsim.report.contents import RunContents, section_of

_MAX_CHARACTERS = 301


def experiment_rows(contents: RunContents) -> list[tuple[str, str]]:
    """Return (label, text) for each line of the box "Experiment", as far as settings are read."""
    settings = contents.settings
    partition = _call(section_of(section_of(settings, "data"), "partition"), "scheme")
    protocol = _call(section_of(settings, "secure_aggregation"), "protocol")
    task = _name_of(settings.get("task"))
    lines = (
        ("Task", ", ", [] if task in ("none", "federated") else [task]),
        ("Data", "; ", _data(contents)),
        ("Partition", ", ", [partition, sizes_text(contents)]),
        ("Model", "; ", _model(contents)),
        ("Federation", ", ", _federation(contents)),
        ("Local training", ", ", _local(contents)),
        ("Privacy", ", ", _privacy(contents)),
        ("Secure aggregation", ", ", [protocol]),
        ("Seed", ", ", [_text(settings.get("seed"))]),
    )
    texts = ((label, between.join(filter(None, parts))) for label, between, parts in lines)
    return [(label, shortened(text, _MAX_CHARACTERS)) for label, text in texts if text]


def sizes_text(contents: RunContents) -> str:
    """Return as text the smallest and largest number of examples of a client; "" if private."""
    if not (sizes := _sizes(contents)):
        return ""
    # Under add/remove the true sizes are private, and none of the files has them.
    noun = "declared examples" if contents.privacy["adjacency"] == "add_remove" else "examples"
    if min(sizes) == max(sizes):
        return f"{sizes[0]:,} {noun} each"
    return f"{min(sizes):,} to {max(sizes):,} {noun}"


def _sizes(contents: RunContents) -> list[int]:
    """Return the number of examples of each client; empty if they are private."""
    return [row["examples"] for row in contents.clients if row["examples"] is not None]


def _data(contents: RunContents) -> Iterator[str]:
    sizes, counts = contents.sizes, _sizes(contents)
    data = section_of(contents.settings, "data")
    if isinstance(dataset := data.get("dataset"), Mapping):
        target = dataset.get("target")
        yield _text(dataset.get("path")) + (f", target {_text(target)}" if target else "")
    else:
        yield _with_options(_text(dataset), data.get("args"))
    if counts and contents.privacy["adjacency"] != "add_remove":
        yield f"{sum(counts):,} training examples"
    if "test_examples" in sizes:
        yield f"{sizes['test_examples']:,} public test examples"
    if shape := sizes.get("input_shape"):
        numbers = " × ".join(f"{size:,}" for size in shape)
        yield f"inputs of {numbers}" if len(shape) > 1 else f"{numbers} features"
    if sizes.get("num_classes"):
        yield f"{sizes['num_classes']:,} classes"


def _model(contents: RunContents) -> Iterator[str]:
    model, sizes = section_of(contents.settings, "model"), contents.sizes
    yield _with_options(_text(model.get("name")), model.get("args"))
    if model.get("features"):
        yield "on " + ", ".join(_name_of(feature) for feature in model["features"])
    if model.get("init"):
        yield f"from {_text(model['init'])}"
    if (parameters := sizes.get("parameters")) is not None:
        trained = sizes.get("trained_parameters")
        words = "" if trained == parameters else f", {trained:,} trained"
        yield f"{parameters:,} parameters{words}"
    if model.get("loss"):
        yield f"loss {_text(model['loss'])}"


def _federation(contents: RunContents) -> Iterator[str]:
    federation = section_of(contents.settings, "federation")
    if not federation:
        return
    yield f"{_text(federation.get('rounds'))} rounds of {_participants(contents, federation)}"
    yield _name_of(federation.get("strategy"))
    yield f"weights {_name_of(federation.get('weighting'))}"
    participation = section_of(federation, "participation")
    if participation.get("scheme") == "poisson":
        yield "participation poisson"
    if participation.get("scheme") == "buffered":
        at_once, how = _text(participation.get("concurrency")), participation.get("durations")
        how = "by a table" if isinstance(how, Mapping) else _text(how).replace("_", "-")
        yield f"asynchronous ({at_once} train at once, durations {how})"
    if federation.get("ema_decay"):
        yield f"server averaging {_text(federation['ema_decay'])}"


def _participants(contents: RunContents, federation: Mapping[str, Any]) -> str:
    """Return the clients of a round in words."""
    participation = section_of(federation, "participation")
    count, scheme = len(contents.clients), participation.get("scheme")
    asked = federation.get("clients_per_round")
    if scheme == "buffered":
        asked = participation.get("buffer_size")
    some = "all" if asked is None else _text(asked)
    if scheme == "trace":
        return f"{some} of the available clients (trace)"
    if scheme == "cyclic":
        groups = participation.get("groups") or len(participation.get("members") or ())
        return f"{some} clients of one of {groups} groups"
    return f"all {count:,} clients" if asked in (None, count) else f"{some} of {count:,} clients"


def _local(contents: RunContents) -> Iterator[str]:
    local = section_of(contents.settings, "local")
    if not local:
        return
    length, epochs = count_text(int(local.get("steps") or 0), "step"), local.get("epochs")
    if epochs:
        length = f"{_text(epochs)} epoch{'' if epochs == 1 else 's'}"
    batch = "all" if local.get("batch_size") == "full" else _text(local.get("batch_size"))
    yield f"{length} of {batch} examples"
    yield _call(local.get("optimizer") or {}, "name")
    if (gradient := _name_of(local.get("gradient"))) not in ("none", "backward"):
        yield f"gradient {gradient}"
    if local.get("lr_schedule"):
        yield f"learning rate {_name_of(local['lr_schedule'])}"
    if (local.get("augmentation_multiplicity") or 1) > 1:
        yield f"{_text(local['augmentation_multiplicity'])} augmentation_multiplicity"


def _privacy(contents: RunContents) -> Iterator[str]:
    privacy, facts = section_of(contents.settings, "privacy"), contents.facts
    if not facts.is_private:
        yield "none"
        return
    yield f"trust {facts.trust.trust}"
    yield f"unit {facts.trust.unit}"
    if noises := [client.noise_multiplier for client in facts.clients]:
        yield f"noise multiplier {range_text(noises)}"
    bound = privacy.get("max_update_norm") or privacy.get("max_grad_norm")
    groups = section_of(privacy, "clipping").get("groups") or {}
    bounds = [f"{name}: {_text(group.get('max_grad_norm'))}" for name, group in groups.items()]
    where = f"bounds of groups ({', '.join(bounds)})" if bounds else _text(bound)
    if (off := facts.mechanism.off_gradients) is not None:
        bound = _text(off.get("max_feature_norm"))
        yield f"mechanism {off.get('name')}, features of norm at most {bound}"
    elif bounds or bound is not None:  # votes have no bound
        yield f"clipping {_name_of(privacy.get('clipping'))} at {where}"
    if (correlation := _name_of(privacy.get("noise_correlation"))) != "none":
        yield f"noise_correlation {correlation}"
    if facts.kind.draws_batches:
        yield f"sampling {_text(contents.privacy.get('sampling'))}"
    yield f"accountant {_text(contents.privacy['accountant'])}"
    if orders := section_of(privacy, "accountant").get("orders"):
        yield f"orders {_text(orders)}"


def _call(section: Mapping[str, Any], key: str) -> str:
    """Return the name in a section as text, with the section's other settings that are on."""
    name = section.get(key)
    if name is None:
        return ""
    others = {k: v for k, v in section.items() if k != key and (v or v is False)}
    if key == "protocol":  # fields, deadlines and keys are of the protocol, not of the experiment
        others = {k: v for k, v in others.items() if k in ("aggregators", "min_clients")}
    return _with_options(_name_of(name), others, brackets=False)


def _with_options(name: str, options: object, *, brackets: bool = True) -> str:
    if not isinstance(options, Mapping) or not options:
        return name
    words = ", ".join(f"{key} {_text(value)}" for key, value in options.items())
    return f"{name} ({words})" if brackets else f"{name}, {words}"


def _name_of(value: object) -> str:
    """Return the name in a setting: a word, a mapping with `name`, or a mapping by name."""
    if isinstance(value, Mapping):
        return _text(value["name"]) if "name" in value else ", ".join(map(_text, value))
    return _text(value)


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    return str(value)
