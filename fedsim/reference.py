"""Generator of docs/reference/keys.md from the code: keys, names, commands and exit codes.

    python -m fedsim.reference > docs/reference/keys.md

Keys come from the settings classes, commands from the command line.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import click
import yaml

from fedsim.algorithms.algorithm import algorithms
from fedsim.catalog import KEYS, catalog
from fedsim.cli import EXIT_CODES, cli
from fedsim.cli.registry import FILES
from fedsim.comparison.settings import ComparisonSettings
from fedsim.core.settings import Settings
from fedsim.data.catalog import DATASETS
from fedsim.experiment import Experiment
from fedsim.models.catalog import MODELS
from fedsim.setting_tables import SettingRow, rows_of

_HEAD = """\
# Keys, commands and exit codes

The code generates this page (`python -m fedsim.reference > docs/reference/keys.md`), and a test
compares the two. `NAME` stands for a name of your own, `[]` for an element of a list. A key with
keys of its own is a name, or a mapping with `name`: `clipping: adaptive`, or
`clipping: {name: adaptive, quantile: 0.3}`. `fedsim validate` reports broken rules between keys."""

_NAMES = "`fedsim list` has these names, and a line on each name that the table of keys lists."
_OPTIONS = "`fedsim COMMAND --help` lists the options of a command."
# Examples for the keys whose type and default give none, and that no section's example has.
_EXAMPLES = """\
name: digits-dp
seed: 1
data: {dataset: digits, partition: {scheme: iid, num_clients: 10}}
data.dataset: {path: patients.csv, target: ill}
data.dataset.columns: {age: {range: [0, 100]}, id: drop}
data.dataset.columns.NAME.range: [0, 100]
data.dataset.columns.NAME.classes: [F, M, unknown]
data.dataset.columns.NAME.above: 0
data.dataset.columns.NAME.date: "%d.%m.%Y"
data.dataset.columns.NAME.fill: unknown
data.dataset.columns.NAME.missing: [-9, unknown]
data.dataset.columns.NAME.other: unknown
data.dataset.constants: public
data.dataset.test: public.csv
data.dataset.decimal: ","
data.dataset.encoding: cp1252
data.args: {examples: 800}
data.images: {channels: last}
data.images.scale: 255
data.test_fraction: 0.2
data.partition: {scheme: dirichlet, num_clients: 10, alpha: 0.5}
data.partition.min_examples: 20
data.partition.column: hospital
data.partition.pattern: hospitals/*.csv
data.partition.args: {alpha: 0.3, partition_by: label}
data.args.path: /data/mnist
data.args.name: flwrlabs/femnist
data.args.subset: default
data.args.revision: 4f0c8a2
data.args.features: image
data.args.seed: 1
model: {name: mlp, args: {hidden: [32]}}
model.name: ./net.py:build
model.args: {hidden: [64, 32]}
model.features: [hog, unit_norm, {center: 0.04}, unit_norm]
model.features[].center: 0.3
model.features[].unit_norm: {}
model.features[].log: 1.0
model.features[].standardize: {mean: 0.3, std: 0.2}
model.features[].hog: {window: 7, stride: 4}
model.features[].random_fourier: {gamma: 0.5}
model.features[].scattering: {scales: 2}
model.init: public.safetensors
model.freeze: ["backbone.*"]
model.train: ["head.*"]
model.lora: {rank: 4, targets: ["blocks.*.query"]}
model.lora.alpha: 8
model.lora.targets: ["blocks.*.query", "blocks.*.value"]
model.loss: ./loss.py:focal
federation: {rounds: 40, weighting: examples_over_noise}
federation.clients_per_round: 5
federation.participation: {scheme: cyclic, groups: 4}
federation.participation.members: ["0-4", "5, 7-9"]
federation.participation.rounds_per_group: 5
federation.participation.rounds_apart: 50
federation.participation.path: availability.csv
federation.participation.availability: "0-9, 12: 1-20, 41-60"
federation.participation.period: 24
federation.participation.min_available: 3
federation.participation.concurrency: 20
federation.participation.buffer_size: 5
federation.participation.durations: {path: speed.csv, column: seconds}
federation.participation.durations.column: seconds
federation.participation.durations.values: [1.0, 2.5]
federation.partial_work: {share: 0.9, on_partial: keep}
federation.deadline: 10
federation.min_participants: 3
federation.strategy: {name: fedadam, server_lr: 0.05}
federation.strategy.malicious_clients: 2
federation.early_stopping: {metric: accuracy, patience: 10}
federation.early_stopping.metric: accuracy
federation.early_stopping.min_delta: 0.002
federation.ema_decay: 0.8
federation.weighting: {name: examples_over_noise, max_share: 0.3}
federation.weighting.size_power: 1
federation.weighting.noise_power: 1
local: {steps: 5, batch_size: 28, optimizer: {name: sgd, lr: 1.0}}
local.epochs: 2
local.batch_size: 28
local.max_physical_batch: 256
local.optimizer: {name: sgd, lr: 1.0, momentum: 0.9}
local.optimizer.momentum: 0.9
local.optimizer.weight_decay: 0.0001
local.gradient: {name: zeroth_order, directions: 128}
local.lr_schedule: {name: cosine, T_max: 40, warmup: 5}
local.lr_schedule.step_size: 10
local.lr_schedule.gamma: 0.9
local.lr_schedule.total_iters: 20
local.lr_schedule.warmup: 5
local.augmentation_multiplicity: 4
local.augmentations: [{shift: 1}, flip]
local.augmentations[].shift: 1
local.augmentations[].flip: true
local.augmentations[].noise: 0.1
local.vectorized_clients: "off"
privacy: {target_epsilon: 8.0, delta: 1.0e-3, max_grad_norm: 0.5}
privacy.trust.colluding_clients: 2
privacy.trust.fallback_epsilon: 4.0
privacy.noise_multiplier: 1.1
privacy.delta: 1.0e-5
privacy.max_update_norm: 0.5
privacy.mechanism: {name: output_perturbation, max_feature_norm: 1.0}
privacy.mechanism.max_target_norm: 1.0
privacy.clipping: {name: adaptive, quantile: 0.5}
privacy.clipping.groups: {"conv.*": {max_grad_norm: 0.3}, "*": {max_grad_norm: 0.5}}
privacy.clipping.groups.NAME.max_grad_norm: 0.3
privacy.clipping.groups.NAME.noise_multiplier: 4
privacy.clipping.groups.NAME.relative_noise: 2
privacy.clipping.count_noise: 5
privacy.sampling: balls_and_bins
privacy.sampling.rate: 0.1
privacy.noise_correlation: {name: toeplitz, bands: 5}
privacy.noise_correlation.buffers: 4
privacy.noise_correlation.scales: [0.26, 0.25]
privacy.noise_correlation.decays: [0.57, 0.98]
privacy.adjacency: {name: add_remove, declared_examples: 1000}
privacy.accountant: {name: rdp, orders: [2, 4, 8, 16, 32]}
privacy.accountant.target_rho: 0.5
privacy.clients: {"3": {target_epsilon: 2.0}}
privacy.clients.NAME.target_epsilon: 2.0
privacy.clients.NAME.noise_multiplier: 2.5
privacy.clients.NAME.delta: 1.0e-6
privacy.clients.NAME.max_grad_norm: 0.3
privacy.clients.NAME.sampling_rate: 0.1
privacy.clients.NAME.members: [0, 1, 5]
privacy.clients.NAME.share: 0.25
privacy.clients.NAME.csv: budgets.csv
privacy.clients.NAME.columns: {target_epsilon: epsilon}
secure_aggregation: {protocol: additive, aggregators: 2}
secure_aggregation.protocol: {name: secagg, threshold: 5}
secure_aggregation.protocol.threshold: 5
secure_aggregation.encoding: {ring_bits: 32}
secure_aggregation.encoding.frac_bits: 24
secure_aggregation.encoding.max_weight: 1000
secure_aggregation.encoding.max_clients: 100
secure_aggregation.metrics: {train_loss: 5.0, train_accuracy: 1.0}
secure_aggregation.keys: {helper_files: [helper-1.key]}
secure_aggregation.keys.helper_fingerprints: [FINGERPRINT]
secure_aggregation.keys.client_fingerprints: [FINGERPRINT]
secure_aggregation.keys.client_files: [client-0.key, client-1.key]
evaluation: {metrics: [balanced_accuracy, f1, auc]}
evaluation.metrics: [balanced_accuracy, f1, ./m.py:cost]
evaluation.group: hospital
evaluation.holdout: 0.2
evaluation.every_rounds: 5
evaluation.clients: 10
personalization: {method: fine_tune, steps: 50, lr: 0.5}
personalization.holdout: 0.2
personalization.batch_size: 32
personalization.parameters: ["layers.2.*"]
personalization.global_prior: [0.5, 0.3, 0.2]
pate: {queries: 200, sigma_threshold: 10, sigma: 6}
pate.answers: 100
pate.student: {steps: 500}
pate.student.optimizer: {name: adam, lr: 0.001}
faults: [{kind: straggler, clients: [3], delay: 60}]
faults[].clients: [0, 3]
faults[].rounds: [1, 2]
faults[].probability: 0.5
faults[].delay: 60
runtime: {engine: ray, workers: 4}
runtime.workers: 4
runtime.address: auto
runtime.trackers: [tensorboard, ./lines.py:Lines]
base: digits_dp.yaml
seeds: 20
baseline: non-private
variants: {non-private: {privacy: null}, eps-1: {privacy.target_epsilon: 1}}
metric: test_accuracy
select: {metric: test_accuracy, on: public_test}
select.among: [low, high]
select.search: {distribution: geometric, mean: 5}
select.search.shape: 0.5
tune: {keys: {local.optimizer.lr: [0.1, 1, 10]}}
max_epsilon: 8.0
delta: 1.0e-6
max_rounds: 100
min_noise_multiplier: 0.5
plugin_digests: []
files: {/srv/heart.csv: [age, ill]}
helpers: [FINGERPRINT]
plan_digests: [FINGERPRINT]
data_name: hospital-7"""
EXAMPLES: dict[str, str] = {
    key: value for key, _, value in (line.partition(": ") for line in _EXAMPLES.splitlines())
}


def reference() -> str:
    """Return the reference page as Markdown."""
    return "\n".join([_HEAD, *_settings(), *_commands(), *_codes()]) + "\n"


def _settings() -> Iterator[str]:
    keys = rows_of(Experiment)
    yield from _section("Keys of an experiment file", _key_table(keys))
    strategies = {name: algorithm.Options for name, algorithm in algorithms().items()}
    for path, word, classes in (
        ("data.args", "dataset", {name: entry.args for name, entry in DATASETS.items()}),
        ("model.args", "name", {name: entry.args for name, entry in MODELS.items()}),
        ("federation.strategy", "name", strategies),
    ):
        rows = _rows_of_choices(classes, path, word)
        yield from _section(f"Keys of `{path}`", _key_table(rows), level=3)
    yield from _section("Built-in names", [_NAMES, "", *_name_table(keys)])
    yield from _section("Keys of a comparison file", _key_table(rows_of(ComparisonSettings)))
    for title, settings in FILES.items():
        yield from _section(f"Keys of {title}", _key_table(rows_of(settings)))


def _rows_of_choices(
    classes: Mapping[str, type[Settings]], path: str, word: str
) -> Iterator[SettingRow]:
    """Yield the keys of settings classes that a name chooses; equal keys are merged."""
    choices_by_row: dict[SettingRow, list[str]] = {}
    for name, settings in classes.items():
        for row in rows_of(settings, path):
            choices_by_row.setdefault(row, []).append(f"{word}: {name}")
    for row, choices in choices_by_row.items():
        yield replace(row, only_with=tuple(choices))


def _key_table(rows: Iterable[SettingRow]) -> Iterator[str]:
    table = []
    for row in rows:
        if row.meaning.endswith(f"see `{row.key.rpartition('.')[0]}`"):
            continue  # the `name` in a mapping, which the head of the page explains
        only = f"; only with `{'`, `'.join(row.only_with)}`" if row.only_with else ""
        example = f"`{example_of(row)}`"
        table.append((f"`{row.key}`", row.values, row.default, row.meaning + only, example))
    yield from _table(("key", "values", "default", "meaning", "example"), table)


def example_of(row: SettingRow) -> str:
    """Return an example value, as YAML, of the key that a row describes."""
    return EXAMPLES.get(row.key) or row.example or _example_in_section(row.key)


def _example_in_section(key: str) -> str:
    """Return the value of a key in the example of its section; "" if the example lacks the key."""
    section, _, name = key.rpartition(".")
    text = EXAMPLES.get(section, "")
    for inner, value in yaml.compose(text).value if text.startswith("{") else ():
        if inner.value == name:
            return text[value.start_mark.index : value.end_mark.index]
    return ""


def _name_table(keys: Iterable[SettingRow]) -> Iterator[str]:
    """Yield a row for each built-in name that the table of keys does not list."""
    listed = {(row.key, name) for row in keys for name in re.findall(r"`(\w+)`", row.values)}
    rows: dict[tuple[str, str], list[str]] = {}  # names with equal descriptions share a row
    for kind, names in catalog().items():
        if not any((KEYS[kind], name) in listed for name in names):
            for name, meaning in names.items():
                rows.setdefault((f"`{KEYS[kind]}`", meaning), []).append(f"`{name}`")
    table = [(key, ", ".join(names), meaning) for (key, meaning), names in rows.items()]
    yield from _table(("key", "name", "meaning"), table)


def _commands() -> Iterator[str]:
    rows: list[tuple[str, str]] = []
    for name, command in cli.commands.items():
        context = click.Context(command, info_name=f"fedsim {name}")
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        rows.append((f"`{usage}`", " ".join((command.help or "").split())))
    yield from _section("Commands", [_OPTIONS, "", *_table(("command", "what it does"), rows)])


def _codes() -> Iterator[str]:
    rows = [(str(int(code)), meaning) for code, meaning in EXIT_CODES.items()]
    yield from _section("Exit codes", _table(("code", "meaning"), rows))


def _section(title: str, lines: Iterable[str], *, level: int = 2) -> Iterator[str]:
    yield from ["", f"{'#' * level} {title}"]
    body = list(lines)
    yield from ["", *body] if body else []


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
