"""Settings classes of a whole experiment file, and functions that write settings as YAML."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, TypeVar, cast

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.json_schema import GenerateJsonSchema

from fedsim.clients.client_settings import FaultSettings
from fedsim.clients.local_settings import LocalSettings
from fedsim.clients.mechanisms.kinds import KINDS, NO_RELEASE, ReleaseKind
from fedsim.clients.mechanisms.votes.ballots import Ballots
from fedsim.clients.privacy_settings import PrivacySettings
from fedsim.core.formatting import count_text
from fedsim.core.python_objects import PythonObject
from fedsim.core.settings import Settings
from fedsim.data.catalog import DATASETS
from fedsim.data.settings import DataSettings, FileDataset
from fedsim.experiment.shapes import Shape, TaggedUnion, child_shape
from fedsim.experiment.yaml_loader import CORE_PATTERNS
from fedsim.models.catalog import MODELS
from fedsim.models.settings import ModelSettings
from fedsim.pate.settings import PateSettings
from fedsim.personalization.settings import PersonalizationSettings
from fedsim.secagg.settings import SecureAggregationSettings
from fedsim.server.settings import EvaluationSettings, FederationSettings
from fedsim.simulation.settings import RuntimeSettings


class FederatedTask:
    """Public facts about `task: federated`, in which clients train one global model in rounds.

    `PateSettings` has the same attributes and methods for `task: pate`.
    """

    saves_derived_model = False  # the run saves the model that the server sends to clients
    votes: Mapping[str, Any] | None = None  # content of `votes` in `privacy.json`

    def ballots(self, rounds: int) -> None:
        """Return None, as clients cast no votes in this task."""

    def work(self, rounds: int, local: LocalSettings) -> str:
        """Return the work of a run in words: its rounds, and the steps or epochs of a round."""
        if local.epochs is None:
            length = count_text(local.given_steps, "step")
        else:
            length = f"{local.epochs:g} epoch{'' if local.epochs == 1 else 's'}"
        return f"{count_text(rounds, 'round')} of {length}"


_HasArgs = TypeVar("_HasArgs", DataSettings, ModelSettings)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Experiment(Settings):
    """The settings of a federated-learning experiment with local differential privacy."""

    name: str = Field(
        pattern=NAME_PATTERN,
        max_length=100,
        description="name of the experiment, in reports and directories",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of all randomness: same file and seed, same model and privacy ledger",
    )
    data: DataSettings = Field(description="the dataset and its partition among clients")
    model: ModelSettings = Field(description="the model and its loss")
    federation: FederationSettings = Field(description="rounds, participation and aggregation")
    local: LocalSettings = Field(description="local training of a client in one round")
    privacy: PrivacySettings | None = Field(
        description="differential privacy of every client: write `privacy: {target_epsilon: ..., "
        "delta: ...}`, or `privacy: null` for a federation without differential privacy",
    )
    secure_aggregation: SecureAggregationSettings | None = Field(
        default=None,
        description="sums updates so that no party sees a single one; null: the server sees all",
    )
    evaluation: EvaluationSettings | None = Field(
        default=None,
        description="metrics on the server's public test set; without differential privacy also "
        "on examples that clients hold out; null: the metrics of the task",
    )
    personalization: PersonalizationSettings | None = Field(
        default=None,
        description="how each client makes a model of its own from the final global model, which "
        "never leaves it; null: no personal models",
    )
    task: Literal["federated", "pate"] = Field(
        default="federated",
        description="federated: rounds of local training make a global model; pate: each client "
        "trains a teacher, teachers vote on public queries, a public student learns the answers",
    )
    pate: PateSettings | None = Field(
        default=None, description="queries, noise and student of `task: pate`; null: another task"
    )
    faults: list[FaultSettings] = Field(
        default=[], description="faults of clients to inject into the run"
    )
    runtime: RuntimeSettings = Field(
        default=RuntimeSettings(),
        description="how the experiment is executed; changes neither the result nor ε",
    )

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of all plug-ins that the result depends on, such as `./file.py:function`.

        Trackers are excluded: they change no result, and no node runs them.
        """
        data, scheme = self.data.dataset, self.data.partition.scheme
        strategy = self.federation.algorithm.name
        named = (data, scheme, self.model.name, self.model.loss, strategy, *(self.metrics or ()))
        return tuple(name for name in named if isinstance(name, str) and ":" in name)

    @property
    def objects(self) -> tuple[PythonObject, ...]:
        """Plug-ins given as Python objects; empty if the settings come from a file."""
        return tuple(plugin for plugin in self.plugins if isinstance(plugin, PythonObject))

    @property
    def metrics(self) -> tuple[str, ...] | None:
        """Metrics on the public test set; None means the default metrics of the task."""
        chosen = None if self.evaluation is None else self.evaluation.metrics
        return None if chosen is None else tuple(chosen)

    @property
    def client_evaluation(self) -> EvaluationSettings | None:
        """Settings by which clients evaluate the model on their own data; None if they do not."""
        evaluation = self.evaluation
        return None if evaluation is None or evaluation.holdout is None else evaluation

    @property
    def task_facts(self) -> PateSettings | FederatedTask:
        """The public facts of the clients' task: training a model, or voting (`task: pate`)."""
        return FederatedTask() if self.pate is None else self.pate

    @property
    def ballots(self) -> Ballots | None:
        """The plan of the votes of `task: pate`; None if clients train a global model."""
        return self.task_facts.ballots(self.federation.rounds)

    @property
    def release_kind(self) -> ReleaseKind:
        """The kind of a client's private release, such as votes; `NO_RELEASE` without privacy."""
        if self.privacy is None:
            return NO_RELEASE
        return KINDS["votes"] if self.task == "pate" else self.privacy.release_kind

    @property
    def not_private(self) -> str:
        """The reason why this experiment has no differential privacy, in words; "" if it has."""
        if self.privacy is not None and self.privacy.adds_noise:
            return ""
        without = "" if self.privacy is None else ": clipping without noise, ε = ∞"
        return f"no differential privacy{without}"

    @property
    def not_deployed(self) -> str:
        """The reason why this experiment cannot be deployed on real nodes; "" if it can."""
        kind = KINDS["votes"] if self.task == "pate" else self.release_kind
        return kind.not_deployed

    @property
    def holdout(self) -> float | None:
        """Share of each client's examples that is held out of training; None without holdout."""
        sections = (self.evaluation, self.personalization)
        return next((each.holdout for each in sections if each is not None and each.holdout), None)

    @property
    def public_parts(self) -> dict[str, Any] | None:
        """Parts of model, training and data that ε takes as public, by name; None without any."""
        parts = {**(self.model.public_parts or {}), **self.local.gradient_facts.public_parts}
        dataset = self.data.dataset
        if isinstance(dataset, FileDataset) and dataset.constants == "from_rows":
            parts["constants"] = dataset.constants
        return parts or None

    @property
    def saves_derived_model(self) -> bool:
        """Whether the saved model is computed from exchanged values together with other values.

        So if clients exchange only a part of the saved model, and for zeroth-order steps and PATE.
        """
        lora = self.model.lora
        is_merged = self.model.has_local_base and (lora is None or lora.save == "merged")
        makers = self.task_facts, self.local.gradient_facts
        return is_merged or any(maker.saves_derived_model for maker in makers)

    @property
    def has_server_noise(self) -> bool:
        """Whether the server adds the noise, so that a client's upload alone is not private."""
        return self.privacy is not None and self.privacy.trust.name == "central"

    @field_validator("data", "model")
    @classmethod
    def _add_default_args(cls, section: _HasArgs) -> _HasArgs:
        """Add the default arguments of a built-in dataset or model; the rules report wrong ones."""
        is_data = isinstance(section, DataSettings)
        entry = DATASETS.get(str(section.dataset)) if is_data else MODELS.get(section.name)
        try:
            args = {} if entry is None else entry.args.model_validate(section.args).model_dump()
        except ValidationError:
            return section
        return section if entry is None else section.model_copy(update={"args": args})

    @field_validator("*")
    @classmethod
    def _keep_valid(cls, value: object, info: ValidationInfo) -> object:
        """Keep each valid section, so that rules check it even if another section has mistakes."""
        if info.context is not None:
            info.context[info.field_name] = value
        return value


class ExperimentWithClients(Experiment):
    """The settings of an experiment whose number of clients is known, from the file or the data.

    The number is also in `data.partition`, and so in a run's `experiment.yaml`.
    """

    @classmethod
    def of(cls, experiment: Experiment, num_clients: int) -> Self:
        """Return an experiment with the number of clients set; it is not validated again.

        Parameters of correlated noise that the settings leave open are set, too.
        """
        partition = experiment.data.partition.model_copy(update={"num_clients": num_clients})
        data = experiment.data.model_copy(update={"partition": partition})
        sections = {**dict(experiment), "data": data}
        known = cls.model_construct(experiment.model_fields_set, **sections)
        privacy = known.privacy
        if privacy is None or privacy.noise_correlation.name == "none":
            return known
        # Imported here: numpy is slow to import, and few files need it.
        from fedsim.noise.correlated.run import with_parameters
        from fedsim.server.participation.participation import Participation

        participation = Participation.of(known.federation, num_clients=num_clients, seed=known.seed)
        momentum = known.federation.algorithm.momentum
        noise = with_parameters(privacy.noise_correlation, participation.separation, momentum)
        changes = {"noise_correlation": noise}
        return known.model_copy(update={"privacy": privacy.model_copy(update=changes)})

    def model_post_init(self, context: object) -> None:
        """Refuse (ValueError) a partition that does not give the number of clients."""
        if self.data.partition.num_clients is None:
            raise ValueError("data.partition.num_clients: missing; only the data know it here")

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return cast(int, self.data.partition.num_clients)


class _UntitledFields(GenerateJsonSchema):
    """A JSON Schema generator that omits the titles, which would only repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an experiment file, for editors."""
    head = {"$schema": GenerateJsonSchema.schema_dialect, "title": "fedsim experiment"}
    return {**head, **Experiment.model_json_schema(schema_generator=_UntitledFields), **head}


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes strings which YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def dump_experiment(experiment: Experiment) -> str:
    """Return the experiment as YAML, including default values, in the order of the schema.

    `load_experiment` reads it back to an equal `Experiment`. Relative paths are kept, so the text
    is valid only in the experiment's directory.
    """
    return yaml_text(experiment.model_dump())


def yaml_text(content: object) -> str:
    """Return settings as YAML text; a Python object is written as its reference `python:NAME`."""
    layout = {"sort_keys": False, "allow_unicode": True, "width": sys.maxsize}
    return yaml.dump(content, Dumper=_Dumper, **layout)


def flat_settings(experiment: Experiment) -> dict[str, object]:
    """Return all settings as `{"key.path": value}`; a list counts as one value.

    A setting that chooses an option, such as `privacy.clipping`, has the option's name as value.
    The option's further keys appear only with values other than the default.
    """
    return dict(_leaves(experiment.model_dump(mode="json"), "", Experiment))


def _leaves(content: object, path: str, shape: Shape) -> Iterator[tuple[str, object]]:
    if not isinstance(content, dict) or not content:
        yield path, content
        return
    if isinstance(shape, TaggedUnion) and shape.takes_name:
        yield path, content[shape.tag]
        chosen = shape.variants[content[shape.tag]]
        defaults = {key: field.default for key, field in chosen.model_fields.items()}
        content = {k: x for k, x in content.items() if k != shape.tag and x != defaults[k]}
        shape = chosen
    for key, value in content.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key), child_shape(shape, key))


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape characters that are not printable, such as line breaks.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[object]) -> yaml.SequenceNode:
    flow = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(str, _represent_string)
_Dumper.add_representer(PythonObject, _represent_string)
_Dumper.add_representer(list, _represent_list)
for _kind, _pattern in CORE_PATTERNS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, None)
