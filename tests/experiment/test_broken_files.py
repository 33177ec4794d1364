"""One mistake, one line: every message a person can meet, as it looks."""

# ruff: noqa: E501 - a message is one line, here as on the screen

from pathlib import Path

import pytest

from fedsim.experiment import ExperimentError, load_experiment

SCHEMES = "one of 'iid', 'dirichlet', 'shards', 'quantity', 'column', 'files', './file.py:function' or 'DirichletPartitioner'"
PLUGIN = "package.module:function or ./file.py:function"
PARTITION = "{scheme: dirichlet, num_clients: 10, alpha: 0.5}"
SGD = "{name: sgd, lr: 1.0}"

# fmt: off
# (text of the good file, what replaces it, the one line that is reported)
BROKEN = [
    # keys
    ("seed: 7", "sead: 7", "2:1: sead: unknown key; did you mean 'seed'?"),
    ("seed: 7", "Seed: 7", "2:1: Seed: unknown key; did you mean 'seed'?"),
    ("seed: 7", "foo: 7", "2:1: foo: unknown key"),
    ("seed: 7", "'a b': 7", "2:1: 'a b': unknown key"),
    ("seed: 7", "7: seed", '2:1: 7: a key must be a string; write "7"'),
    ("seed: 7", "name: x", "2:1: name: duplicate key; it is already on line 1"),
    ("seed: 7", "rounds: 7", "2:1: rounds: unknown key here; it belongs to federation"),
    ("  steps: 5\n", "", "14:1: local: needs steps, or epochs in its place, got neither; add steps: 5"),
    ("steps: 5", "step: 5", "15:3: local.step: unknown key; did you mean 'steps'?"),
    ("runtime: {engine: local}", "runtime: {vectorized_clients: off}", "22:11: runtime.vectorized_clients: unknown key here; it belongs to local"),
    (f"optimizer: {SGD}", "lr: 1", "17:3: local.lr: unknown key here; it belongs to local.optimizer"),
    ("max_grad_norm", "clip_norm", "21:3: privacy.clip_norm: unknown key; did you mean 'max_grad_norm'?"),
    (
        "noise_multiplier",
        "noise-multipler",
        "19:3: privacy.noise-multipler: unknown key; did you mean 'noise_multiplier'?",
    ),
    ("num_clients: 10", "num_clients:10", "6:34: data.partition.'num_clients:10': unknown key; write a space after ':'"),
    ("{name: sgd,", "{<<: {}, name: sgd,", "17:15: local.optimizer.'<<': YAML 1.2 has no merge keys; write the keys out"),
    # types
    ("rounds: 4", "rounds: ten", "11:3: federation.rounds: must be a whole number, got 'ten'"),
    ("rounds: 4", "rounds: 4.0", "11:3: federation.rounds: must be a whole number, got 4.0"),
    ("rounds: 4", "rounds: true", "11:3: federation.rounds: must be a whole number, got true"),
    ("rounds: 4", "rounds:", "11:3: federation.rounds: must be a whole number, got null"),
    ("rounds: 4", "rounds: [4]", "11:3: federation.rounds: must be a whole number, got a list"),
    ("rounds: 4", "rounds: '4'", "11:3: federation.rounds: must be a whole number, got '4'"),
    ("clients_per_round: 10", "clients_per_round: all", "12:3: federation.clients_per_round: must be a whole number, got 'all'"),
    ("lr: 1.0", "lr: true", "17:26: local.optimizer.lr: must be a number, got true"),
    ("lr: 1.0", "lr: {}", "17:26: local.optimizer.lr: must be a number, got an empty mapping"),
    ("name: demo", "name: 3", "1:1: name: must be a string, got 3"),
    ("runtime: {engine: local}", "runtime:", "22:1: runtime: must be a mapping, got null"),
    ("{hidden: [32]}", "[32]", "9:3: model.args: must be a mapping, got a list"),
    ("seed: 7", "seed: !!int '7'", "2:7: seed: tag !!int is not allowed; write the value"),
    ("seed: 7", "seed: !!int yes", "2:7: seed: tag !!int is not allowed; write the value"),
    ("{hidden: [32]}", "!!set {hidden}", "9:9: model.args: tag !!set is not allowed; write the value"),
    (
        "name: demo",
        "name: !!python/object/apply:os.system [ls]",
        "1:7: name: tag !!python/object/apply:os.system is not allowed; write the value",
    ),
    # ranges
    ("rounds: 4", "rounds: 0", "11:3: federation.rounds: must be >= 1, got 0"),
    ("max_grad_norm: 0.5", "max_grad_norm: -1", "21:3: privacy.max_grad_norm: must be > 0, got -1"),
    ("max_grad_norm: 0.5", "max_grad_norm: .inf", "21:3: privacy.max_grad_norm: must be a finite number, got .inf"),
    ("delta: 1.0e-3", "delta: 1", "20:3: privacy.delta: must be < 1, got 1"),
    ("delta: 1.0e-3", "delta: 0.0", "20:3: privacy.delta: must be > 0, got 0.0"),
    ("delta: 1.0e-3", "delta: .nan", "20:3: privacy.delta: must be a finite number, got .nan"),
    ("test_fraction: 0.2", "test_fraction: 1.5", "5:3: data.test_fraction: must be < 1, got 1.5"),
    ("alpha: 0.5", "alpha: -.inf", "6:51: data.partition.alpha: must be a finite number, got -.inf"),
    ("seed: 7", "seed: -1", "2:1: seed: must be >= 0, got -1"),
    (
        "seed: 7",
        "seed: 9223372036854775808",
        "2:1: seed: must be < 9223372036854775808, got 9223372036854775808",
    ),
    ("seed: 7", f"seed: 1{'0' * 99}", "2:1: seed: must be < 9223372036854775808, got a huge number"),
    (
        "name: demo",
        "name: a b",
        "1:1: name: must be letters, digits, '.', '_' or '-', starting with a letter or a digit, "
        "got 'a b'",
    ),
    (
        "name: demo",
        "name: ../x",
        "1:1: name: must be letters, digits, '.', '_' or '-', starting with a letter or a digit, "
        "got '../x'",
    ),
    ("name: demo", f"name: {'x' * 101}", "1:1: name: must have at most 100 characters"),
    # choices
    (
        "weighting: uniform",
        "weighting: exmples",
        "13:3: federation.weighting: must be one of 'uniform', 'examples' or 'examples_over_noise', got "
        "'exmples'; did you mean 'examples'?",
    ),
    (
        "weighting: uniform",
        "strategy: fedavgg",
        "13:3: federation.strategy: unknown strategy 'fedavgg'; did you mean 'fedavg'?",
    ),
    (
        "weighting: uniform",
        "strategy: {name: fedadam, tua: 0.1}",
        "13:29: federation.strategy.tua: unknown key; did you mean 'tau'?",
    ),
    (
        "weighting: uniform",
        "strategy: {name: fedadam, server_lr: 0}",
        "13:29: federation.strategy.server_lr: must be > 0, got 0",
    ),
    ("weighting: uniform", "weighting: no", "13:3: federation.weighting: must be one of 'uniform', 'examples' or 'examples_over_noise', got 'no'"),
    (
        "weighting: uniform",
        "weighting: {name: examples_over_noise, size_powr: 2}",
        "13:42: federation.weighting.size_powr: unknown key; did you mean 'size_power'?",
    ),
    (
        "weighting: uniform",
        "weighting: {name: examples, size_power: 2}",
        "13:3: federation.weighting: size_power belongs to name: examples_over_noise, got name: examples",
    ),
    (
        "weighting: uniform",
        "weighting: {name: examples, max_share: 0.05}",
        "13:31: federation.weighting.max_share: must be at least 1/10, the share of each of the 10 "
        "clients of a round under equal weights, got 0.05; raise it",
    ),
    # unions with a tag
    ("scheme: dirichlet", "scheme: drichlet", f"6:15: data.partition.scheme: must be {SCHEMES}, got 'drichlet'; did you mean 'dirichlet'?"),
    ("scheme: dirichlet", "scheme: 3", f"6:15: data.partition.scheme: must be {SCHEMES}, got 3"),
    ("scheme: dirichlet", "scheme: [iid]", f"6:15: data.partition.scheme: must be {SCHEMES}, got a list"),
    ("scheme: dirichlet, ", "", f"6:3: data.partition.scheme: missing; {SCHEMES.removeprefix('one of ')}"),
    ("scheme: dirichlet", "schema: dirichlet", "6:15: data.partition.schema: unknown key; did you mean 'scheme'?"),
    ("num_clients: 10, ", "", "6:3: data.partition.num_clients: missing; number of clients"),
    (PARTITION, "iid", "6:3: data.partition: must be a mapping, got 'iid'"),
    (f"  partition: {PARTITION}\n", "", f"3:1: data.partition: missing; a mapping with scheme: {SCHEMES.removeprefix('one of ')}"),
    (
        "scheme: dirichlet",
        "scheme: iid",
        "6:45: data.partition.alpha: unknown key for scheme 'iid'; it belongs to 'dirichlet' or "
        "'quantity'",
    ),
    (SGD, "{name: adam, lr: 1, momentum: 0.9}", "17:34: local.optimizer.momentum: unknown key for name 'adam'; it belongs to 'sgd'"),
    (SGD, "{name: adamw}", "17:3: local.optimizer.lr: missing; learning rate"),
    ("name: sgd", "name: SGD", "17:15: local.optimizer.name: must be one of 'sgd', 'adam' or 'adamw', got 'SGD'; did you mean 'sgd'?"),
    ("lr: 1.0", "learning_rate: 1.0", "17:26: local.optimizer.learning_rate: unknown key; did you mean 'lr'?"),
    # rules of one section
    (
        "  noise_multiplier: 1.1\n",
        "",
        "18:1: privacy: needs target_epsilon, noise_multiplier or both, got neither; "
        "target_epsilon alone calibrates the noise for you",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  adjacency: add_remove",
        "22:3: privacy.adjacency.declared_examples: missing; public number of examples, such as "
        "1000, that sets the sampling rate in place of a client's private size",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  on_exhausted: stop",
        "18:1: privacy: on_exhausted: stop needs a budget: give target_epsilon, for all or for "
        "some clients",
    ),
    (
        "runtime: {engine: local}",
        "runtime: {workers: 2}",
        "22:1: runtime: engine local runs in one process, got workers: 2; use engine: ray for more",
    ),
    # rules of several sections
    ("clients_per_round: 10", "clients_per_round: 11", "12:3: federation.clients_per_round: must be <= data.partition.num_clients (10), got 11"),
    ("seed: 7", "secure_aggregation: {min_clients: 11}", "2:22: secure_aggregation.min_clients: must be at most 10, the clients of a round, got 11; lower it, or raise federation.clients_per_round"),
    ("seed: 7", "secure_aggregation: {protocol: {name: secagg, threshold: 5}}", "2:47: secure_aggregation.protocol.threshold: must be above half of the 10 clients of a round and at most all of them, got 5; use auto"),
    ("seed: 7", "secure_aggregation: {metrics: {train_loss: 4.0}}", "2:22: secure_aggregation.metrics: means over private examples have no noise, and no ε covers them or their sum; remove metrics, or set privacy: null"),
    ("seed: 7", "secure_aggregation: {keys: {helper_files: [a.key, b.key]}}", "2:1: secure_aggregation: keys.helper_files names 2 keys, but 2 aggregators have 1 helpers; name one for each, or none"),
    ("seed: 7", "secure_aggregation: {encoding: {frac_bits: 60}}", "2:1: secure_aggregation: the sum does not fit into the ring: 10 clients x weight 1 x bound 8.0 at frac_bits 60 need 67 bits, but a 64-bit ring with 8 guard bits holds 55; use frac_bits 32 or less, or auto"),
    ("seed: 7", "secure_aggregation: {protocol: secagg, aggregators: 3}", "2:40: secure_aggregation.aggregators: protocol: secagg has a single server, without helpers and lasting keys; remove aggregators, or use protocol: additive"),
    ("seed: 7", "secure_aggregation: {protocol: {name: secagg, security_bits: 50}}", "2:47: secure_aggregation.protocol.security_bits: unknown key for name 'secagg'; it belongs to 'secagg_plus'"),
    ("seed: 7", "secure_aggregation: {protocol: secag}", "2:22: secure_aggregation.protocol: must be one of 'additive', 'secagg', 'secagg_plus' or 'quantized', got 'secag'; did you mean 'secagg'?"),
    ("seed: 7", "secure_aggregation: {protocol: secagg, threshold: 5}", "2:40: secure_aggregation.threshold: unknown key here; it belongs to secure_aggregation.protocol"),
    # not in this version
    ("delta: 1.0e-3", "delta: aut", "20:3: privacy.delta: must be a number or 'auto', got 'aut'; did you mean 'auto'?"),
    ("delta: 1.0e-3", "delta: [1]", "20:3: privacy.delta: must be a number or 'auto', got a list"),
    ("max_grad_norm: 0.5", "max_grad_norm: 0.5\n  clients: {'1': {epsilon: 2.0}}", "22:19: privacy.clients.1.epsilon: unknown key; did you mean 'target_epsilon'?"),
    ("max_grad_norm: 0.5", "max_grad_norm: 0.5\n  clipping: adaptativ", "22:3: privacy.clipping: must be one of 'flat', 'automatic', 'per_layer' or 'adaptive', got 'adaptativ'; did you mean 'adaptive'?"),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  clipping: {name: flat, quantile: 0.9}",
        "22:26: privacy.clipping.quantile: unknown key for name 'flat'; it belongs to 'adaptive'",
    ),
    ("max_grad_norm: 0.5", "max_grad_norm: 0.5\n  clipping: {name: adaptive, quantile: 1.5}", "22:30: privacy.clipping.quantile: must be <= 1, got 1.5"),
    # privacy without a guarantee
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  sampling: fixed_size",
        "18:1: privacy: sampling fixed_size has no guarantee under adjacency zero_out, because "
        "another example fills the "
        "place of a missing one: set adjacency: replace_one, or sampling: poisson or shuffle or "
        "balls_and_bins",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  sampling: shuffle\n  adjacency: {name: add_remove, declared_examples: 100}",
        "18:1: privacy: sampling shuffle has no guarantee under adjacency add_remove, because one "
        "more example moves others "
        "to another batch: set adjacency: zero_out or replace_one, or sampling: poisson or "
        "balls_and_bins",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  adjacency: {name: replace_one, declared_examples: 100}",
        "22:34: privacy.adjacency.declared_examples: unknown key for name 'replace_one'; it "
        "belongs to 'add_remove'",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  noise_correlation: toeplitz",
        "22:3: privacy.noise_correlation.bands: missing; number of steps, including the first, "
        "over which the noise of a step is partly cancelled; two uses of an example are at least "
        "as many steps apart",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  noise_correlation: {name: toeplit}",
        "22:23: privacy.noise_correlation.name: must be one of 'none', 'toeplitz', 'identity', "
        "'tree' or 'blt', got 'toeplit'; did you mean 'toeplitz'?",
    ),
    (
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  sampling: fixedsize",
        "22:3: privacy.sampling: must be one of 'poisson', 'fixed_size', 'shuffle', "
        "'balls_and_bins', 'cyclic' or 'cyclic_poisson', got 'fixedsize'; did you mean "
        "'fixed_size'?",
    ),
    ("max_grad_norm: 0.5", "max_grad_norm: 0.5\n  accountant: prv", "22:3: privacy.accountant: must be one of 'pld', 'moments' or 'rdp', got 'prv'"),
    ("engine: local", "engine: spark", "22:11: runtime.engine: must be one of 'local', 'ray' or 'flower', got 'spark'"),
    ("engine: local", "engine: flower, address: auto", "22:1: runtime: address is for engine: ray, got engine: flower"),
    (
        "engine: local",
        "engine: ray, address: 'ray://head:10001'",
        "22:1: runtime: address ray://head:10001 is a Ray client's, and the ledger needs the run "
        "on a machine of the cluster; start fedsim there and write host:port or auto",
    ),
    # datasets
    ("digits", "digit", "4:3: data.dataset: unknown dataset 'digit'; did you mean 'digits'?"),
    ("digits", "DIGITS", "4:3: data.dataset: unknown dataset 'DIGITS'; did you mean 'digits'?"),
    ("digits", "mnist", "3:1: data.args.path: missing; folder with the official files, packed or not, relative to the experiment file"),
    ("digits", "emnist\n  args: {path: ., split: all}", "5:19: data.args.split: must be one of 'byclass', 'bymerge', 'balanced', 'letters', 'digits' or 'mnist', got 'all'"),
    ("digits", "iris\n  args: {scale: 2}", "5:10: data.args.scale: unknown key; did you mean 'scaled'?"),
    ("{scheme: dirichlet, num_clients: 10, alpha: 0.5}", "{scheme: column, column: user}", "6:31: data.partition.column: digits has no column 'user' that names clients; use another scheme"),
    ("digits", "huggingface", "3:1: data.args: needs one of path (a folder) and name (on the hub)"),
    ("digits", "iris\n  images: {scale: 2}", "5:3: data.images: the built-in dataset 'iris' has its layout and range; remove images"),
    ("digits", "{path: d.csv, target: y}\n  images: {scale: 2}", "5:3: data.images: is for arrays in an .npz file, and the dataset is a table; remove images"),
    ("digits", "x.csv", "4:3: data.dataset: unknown dataset 'x.csv'; to use a file write {path: FILE, target: NAME}"),
    ("digits", "x.py", "4:3: data.dataset: unknown dataset 'x.py'; to use a function of the file write ./file.py:function"),
    ("digits", "3", "4:3: data.dataset: must be a string or a mapping with path, target, columns, constants, test, decimal and encoding, got 3"),
    ("digits", "[digits]", "4:3: data.dataset: must be a string or a mapping with path, target, columns, constants, test, decimal and encoding, got a list"),
    ("digits", "{path: d.csv}", "4:3: data.dataset.target: missing; column (csv, parquet) or array (npz) to predict"),
    ("digits", "{path: d.csv, taget: y}", "4:26: data.dataset.taget: unknown key; did you mean 'target'?"),
    ("digits", "{path: d.csv, target: 3}", "4:26: data.dataset.target: must be a string, got 3"),
    ("digits", "{path: d.txt, target: y}", "4:13: data.dataset.path: must end in '.npz', '.csv' or '.parquet', got 'd.txt'"),
    ("digits", "{path: d.csv, target: y}\n  args: {n: 1}", "5:3: data.args: a data file takes no arguments; remove args"),
    ("digits", "digits\n  args: {n: 1}", "5:3: data.args: the built-in dataset 'digits' takes no arguments; remove args"),
    ("digits", "pkg.mod:f\n  args: {n: [1, .nan]}", "5:17: data.args.n.1: must be a finite number, got .nan"),
    ("digits", "pkg..mod:f", f"4:3: data.dataset: must be {PLUGIN}, got 'pkg..mod:f'"),
    ("digits", "pkg.mod:2", f"4:3: data.dataset: must be {PLUGIN}, got 'pkg.mod:2'"),
    ("digits", "pkg.mod:f.", f"4:3: data.dataset: must be {PLUGIN}, got 'pkg.mod:f.'"),
    ("digits", "./p.txt:f", "4:3: data.dataset: a plug-in file must end in '.py', got './p.txt:f'"),
    # models and losses
    ("name: mlp", "name: MLP", "8:3: model.name: unknown model 'MLP'; did you mean 'mlp'?"),
    ("name: mlp", "name: resnet", f"8:3: model.name: unknown model 'resnet'; built in: 'cnn', 'logistic' or 'mlp'; a plug-in is {PLUGIN}"),
    ("name: mlp", "name: mlp\n  loss: cross-entropy", "9:3: model.loss: unknown loss 'cross-entropy'; did you mean 'cross_entropy'?"),
    ("name: mlp", "name: logistic", "9:10: model.args.hidden: unknown key"),
    ("name: mlp", "name: pkg:Net\n  loss: pkg:", "9:12: not valid YAML: ':' is not allowed here; check the indentation above"),
    ("hidden: [32]", "hiden: [32]", "9:10: model.args.hiden: unknown key; did you mean 'hidden'?"),
    ("[32]", "32", "9:10: model.args.hidden: must be a list, got 32"),
    ("[32]", "[]", "9:10: model.args.hidden: must have at least 1 item, got an empty list"),
    ("[32]", "[32, 0]", "9:23: model.args.hidden.1: must be >= 1, got 0"),
    ("[32]", "[32, true]", "9:23: model.args.hidden.1: must be a whole number, got true"),
    ("[32]", "[32], activation: relo", "9:24: model.args.activation: must be 'relu' or 'tanh', got 'relo'; did you mean 'relu'?"),
]
# fmt: on


@pytest.mark.parametrize(("old", "new", "line"), BROKEN)
def test_one_mistake_is_one_line(write, good: str, old: str, new: str, line: str) -> None:
    Path("d.csv").write_text("y\n")
    Path("p.py").write_text("")
    assert old in good
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good.replace(old, new, 1)))
    assert str(caught.value) == f"exp.yaml:{line}"
    assert len(caught.value.problems) == 1


def test_weights_that_leak_private_client_sizes_are_refused(write, good: str) -> None:
    text = good.replace("weighting: uniform", "weighting: examples").replace(
        "max_grad_norm: 0.5",
        "max_grad_norm: 0.5\n  adjacency: {name: add_remove, declared_examples: 100}",
    )
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(text))
    assert str(caught.value) == (
        "exp.yaml:13:3: federation.weighting: 'examples' would reveal client sizes, which "
        "adjacency add_remove keeps private; use weighting: uniform or adjacency: zero_out"
    )
    load_experiment(write(text.replace("weighting: examples", "weighting: uniform")))


@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        ("{path: no.csv, target: y}", "no.csv"),
        ("{path: sub/../no.npz, target: y}", "no.npz"),
        ("./no.py:f", "no.py"),
        ("../no.py:f", "../no.py"),
    ],
)
def test_files_must_exist(write, good: str, dataset: str, file: str) -> None:
    key = "data.dataset.path" if "path" in dataset else "data.dataset"
    column = 13 if "path" in dataset else 3
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good.replace("digits", dataset)))
    full = str((Path.cwd() / file).resolve())
    assert str(caught.value) == f"exp.yaml:4:{column}: {key}: no such file: {full!r}"


@pytest.mark.parametrize(
    ("path", "problem"),
    [("absent", "no such folder:"), ("d.csv", "must be the folder with the files, got the file")],
)
def test_folders_must_exist(write, good: str, path: str, problem: str) -> None:
    Path("d.csv").write_text("y\n")
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(good.replace("digits", f"mnist\n  args: {{path: {path}}}")))
    assert (
        str(caught.value)
        == f"exp.yaml:5:10: data.args.path: {problem} {str(Path(path).resolve())!r}"
    )


def test_images_are_no_tokens(write, good: str) -> None:
    dataset = "pkg.mod:f\n  images: {channels: last}\n  features: tokens"
    with pytest.raises(ExperimentError, match=r"5:3: data.images: images are numbers, and"):
        load_experiment(write(good.replace("digits", dataset)))


def test_many_mistakes_are_reported_at_once_in_the_order_of_the_file(write) -> None:
    path = write(
        """\
name: a b
sed: 1
name: again
data:
  dataset: {path: x.txt}
  partition: {scheme: shards, alpha: 1, num_clients: 2}
model:
  name: mlp
  args: {hidden: [-1]}
  loss: hinge
federation:
  rounds: 0
  clients_per_round: 3
local:
  batch_size: !!int 4
  optimizer: {lr: 1, nmae: sgd}
privacy:
  noise_multiplier: 1
  delta: 2
runtime: {engine: raye}
5: x
"""
    )
    with pytest.raises(ExperimentError) as caught:
        load_experiment(path)
    assert str(caught.value).splitlines() == [
        "exp.yaml:1:1: name: must be letters, digits, '.', '_' or '-', "
        "starting with a letter or a digit, got 'a b'",
        "exp.yaml:2:1: sed: unknown key; did you mean 'seed'?",
        "exp.yaml:3:1: name: duplicate key; it is already on line 1",
        "exp.yaml:5:3: data.dataset.target: missing; column (csv, parquet) or array (npz) to "
        "predict",
        "exp.yaml:6:31: data.partition.alpha: unknown key for scheme 'shards'; "
        "it belongs to 'dirichlet' or 'quantity'",
        "exp.yaml:9:19: model.args.hidden.0: must be >= 1, got -1",
        "exp.yaml:10:3: model.loss: unknown loss 'hinge'; built in: 'bce', 'cross_entropy' or "
        f"'mse'; a plug-in is {PLUGIN}",
        "exp.yaml:12:3: federation.rounds: must be >= 1, got 0",
        "exp.yaml:15:15: local.batch_size: tag !!int is not allowed; write the value",
        "exp.yaml:16:22: local.optimizer.nmae: unknown key; did you mean 'name'?",
        "exp.yaml:19:3: privacy.delta: must be < 1, got 2",
        "exp.yaml:20:11: runtime.engine: must be one of 'local', 'ray' or 'flower', got 'raye'; "
        "did you mean 'ray'?",
        'exp.yaml:21:1: 5: a key must be a string; write "5"',
    ]


def test_rules_between_sections_run_although_other_sections_are_wrong(write, good: str) -> None:
    text = good.replace("clients_per_round: 10", "clients_per_round: 99").replace("lr:", "rl:")
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(text))
    assert [problem.path for problem in caught.value.problems] == [
        ("federation", "clients_per_round"),
        ("local", "optimizer", "rl"),
    ]


def test_missing_sections_are_reported_at_the_top(write) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write("# a comment\nnmae: x\n"))
    assert str(caught.value).splitlines() == [
        "exp.yaml:2:1: nmae: unknown key; did you mean 'name'?",
        "exp.yaml:2:1: data: missing; the dataset and its partition among clients",
        "exp.yaml:2:1: model: missing; the model and its loss",
        "exp.yaml:2:1: federation: missing; rounds, participation and aggregation",
        "exp.yaml:2:1: local: missing; local training of a client in one round",
        "exp.yaml:2:1: privacy: missing; differential privacy of every client: write "
        "`privacy: {target_epsilon: ..., delta: ...}`, or `privacy: null` for a federation without "
        "differential privacy",
    ]
