"""Public names of fedsim 0.1 under their old paths: each works until 0.3, with a warning.

`import fedsim` installs a finder for modules that moved. A module that still exists under the path
of names that left it has one line, `__getattr__ = moved_names_of(__name__)`.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_DROPPED_IN = "0.3"
_WITHOUT_REPLACEMENT = "accountant.rdp.without_replacement"

# (old package, new package, modules); `old=new` where the file's name changed too.
_MODULE_MOVES = (
    ("accountant", "accountant.rdp", "conversion curves selection allocation=random_allocation"),
    ("accountant", "accountant.rdp", "fleet_rdp=table rdp_batch=poisson_batch"),
    ("accountant", "accountant.rdp", "wor_rdp=without_replacement"),
    ("accountant", "accountant.pld", "fourier loss_pmf privacy_profile saddle_point"),
    ("accountant", "accountant", "fleet_pld=fleet.pld journal=ledger.journal"),
    ("accountant", "accountant.budget", "filter budgets=kinds"),
    ("accountant", "accountant.textbook", "classical moments pate renyi"),
    ("clients", "clients", "many=app failures=failure_text"),
    ("clients", "clients.model_checks", "safety"),
    ("clients.dp_sgd", "clients.clipping", "adaptive clipping"),
    ("clients.dp_sgd", "clients.sampling", "sampling=catalog sampling_schemes=schemes"),
    ("clients.dp_sgd", "noise", "keystream noise=sources"),
    ("clients", "clients.budget", "client_terms=client_privacy noise_search plan"),
    ("clients", "clients.training", "cohort_training=block optimizers"),
    ("clients", "clients.training", "workbench=shared_model"),
    ("clients", "clients.secure", "masked_upload secure_channel=channel"),
    ("clients", "clients.secure", "secure_upload=additive_upload"),
    ("clients", "clients.privacy_engine", "attachment engine_state=state forward_checks loaders"),
    ("clients", "clients.privacy_engine", "lot_schedule lot_sizes opacus_style optimizer_patch"),
    ("clients", "clients.privacy_engine", "pass_tape=recorded_pass private_steps=steps"),
    ("clients", "clients.privacy_engine", "privacy_terms=terms"),
    ("clients", "clients", "spending=privacy_engine.spend fault_settings=faults.settings"),
    ("server", "server.aggregation", "averaging=aggregator"),
    ("server", "algorithms", "state strategies=built_in.fedavg"),
    ("server.aggregation", "algorithms", "strategies=algorithm"),
    ("server", "server", "evaluating=evaluation privacy_book=client_ledgers"),
    ("server", "server.secure", "secure_averaging=aggregator secure_exchange=rounds"),
    ("server", "server.secure", "secure_helper=helper_app secure_openings=opened_sums"),
    ("server", "protocol", "live_arrays protocol=messages records secure_protocol=secure"),
    ("server", "core", "streams"),
    ("server", "", "secure_aggregation=secagg"),
    ("server.secure_aggregation", "secagg", "additive context digests encoding errors graph hpke"),
    ("server.secure_aggregation", "secagg", "identity layout messages metrics pairwise payload"),
    ("server.secure_aggregation", "secagg", "prg settings shamir wire"),
    ("server.secure_aggregation", "server.secure", "archive helper leader masked_sum recovery"),
    ("server.secure_aggregation", "server.secure", "report"),
    ("", "core", "errors plugins"),
    ("runs", "runs", "resuming=resume running=runner"),
)
# (old module, new module, names); `old=new` where the name changed too.
_NAME_MOVES = (
    ("accountant.fleet", "accountant.fleet.accountant", "Client FleetAccountant"),
    ("accountant.ledger", "accountant.ledger.privacy_ledger", "PrivacyLedger records_of"),
    ("accountant.moments", "accountant.rdp.log_moments", "interpolate_log_moments"),
    ("accountant.pld", "accountant.pld.distribution", "pld_delta pld_epsilon"),
    ("accountant.rdp", "accountant.rdp.poisson", "DEFAULT_ORDERS checked_orders=check_orders"),
    ("accountant.rdp", "accountant.rdp.poisson", "rdp_replaced_gaussian rdp_sampled_gaussian"),
    ("accountant.wor_rdp", _WITHOUT_REPLACEMENT, "wor_rdp=rdp_without_replacement"),
    (
        "accountant.wor_rdp",
        _WITHOUT_REPLACEMENT,
        "wor_rdp_lower=rdp_without_replacement_lower_bound "
        "wor_rdp_published=rdp_without_replacement_published "
        "wor_rdp_tightened=rdp_without_replacement_tightened",
    ),
    ("clients.account", "clients.account", "BudgetExhaustedError=ClientBudgetExhaustedError"),
    ("clients.budget", "clients.budget.affordable_steps", "epsilon_of=epsilon_of_steps"),
    ("clients.client_terms", "clients.budget.client_privacy", "ClientTerms=ClientPrivacy"),
    ("clients.cohort_training", "clients.training.block", "Trained=BlockResult"),
    ("clients.cohort_training", "clients.training.block", "Trainee=BlockMember"),
    ("clients.dp_sgd.mechanism", "clients.dp_sgd.mechanism", "DpSgdStep=DpSgdMechanism"),
    ("clients.faults", "clients.faults.injection", "DropoutAfter DropoutBefore EmptyPartition"),
    ("clients.faults", "clients.faults.injection", "FailsInTraining=TrainingFailure Fault"),
    ("clients.faults", "clients.faults.injection", "FaultPlan InjectedFaultError NO_FAULTS"),
    ("clients.faults", "clients.faults.injection", "SpoiledUpload=CorruptUpload Straggler"),
    ("clients.app", "clients.app", "make_client_app=BatchClientApp"),
    ("clients.app", "clients.task", "Evaluate"),
    ("clients.many", "clients.app", "ManyAnswers=BatchAnswers ManyClientsApp=BatchClientApp"),
    ("clients.many", "clients.client_round", "Turn=ClientRound"),
    ("clients.pass_tape", "clients.privacy_engine.recorded_pass", "PassTape=RecordedPass"),
    ("clients.noise_search", "accountant.search", "MOST_NOISE TOLERANCE=NOISE_TOLERANCE"),
    ("clients.noise_search", "accountant.search", "least_noise"),
    ("clients.training", "clients.training.plain", "train_plain=train_by_torch"),
    ("clients.training", "clients.training.streams", "StreamKey"),
    ("clients.workbench", "clients.training.shared_model", "Workbench=SharedModel"),
    ("runs.running", "api", "run"),
    ("runs.running", "tracking.observer", "RunObserver"),
    ("server.aggregation", "server.aggregation.mean", "Arrays InvalidUpdateError OrderedMean"),
    ("server.aggregation", "server.aggregation.mean", "check_update"),
    ("server.aggregation.strategies", "algorithms.algorithm", "Strategy=Algorithm"),
    ("server.aggregation.strategies", "algorithms.built_in.fedavg", "FedAvg"),
    ("server.averaging", "server.aggregation.aggregator", "Answer=ClientAnswer"),
    ("server.averaging", "server.aggregation.aggregator", "Averaged=AggregationResult"),
    ("server.averaging", "server.aggregation.aggregator", "Averaging=Aggregator"),
    ("server.averaging", "server.aggregation.aggregator", "PlainAveraging=PlainAggregator"),
    ("server.evaluating", "server.evaluation", "Evaluated=EvaluationResult"),
    ("server.participation", "server.participation.participation", "Participation"),
    ("server.privacy_book", "server.client_ledgers", "PrivacyBook=ClientLedgers"),
    ("plugins", "core.plugins", "describe=describe_error"),
    ("server.live_arrays", "protocol.live_arrays", "portable=to_portable"),
    ("server.protocol", "protocol.arrays", "digest to_arrays to_numpy"),
    ("server.protocol", "protocol.client_spend", "PrivacyStatement=ClientSpend"),
    ("server.protocol", "protocol.errors", "ProtocolError"),
    ("server.protocol", "protocol.records", "record_of"),
    ("server.protocol", "protocol.roll_call", "IDENTITY PARTITION ROLE ROLL_CALL ROLL_CALL_TYPE"),
    ("server.protocol", "protocol.roll_call", "Identity=NodeIdentity identity_of"),
    ("server.protocol", "protocol.roll_call", "roll_call_message roll_call_reply"),
    ("server.secure_aggregation.digests", "secagg.digests", "add_checked=verify_and_add"),
    ("server.secure_aggregation.encoding", "secagg.encoding", "BLOCK=BLOCK_VALUES"),
    ("server.secure_aggregation.encoding", "secagg.encoding", "MOST_FRAC_BITS=MAX_FRAC_BITS"),
    ("server.secure_aggregation.errors", "secagg.errors", "refusal=error_by_name"),
    ("server.secure_aggregation.helper", "secagg.additive_info", "seed_info total_info"),
    ("server.secure_aggregation.hpke", "secagg.hpke", "checked_public_key=load_public_key"),
    ("server.secure_aggregation.hpke", "secagg.hpke", "OVERHEAD=ENVELOPE_OVERHEAD_BYTES"),
    ("server.secure_aggregation.identity", "secagg.identity", "check_pinned=verify_helper_key"),
    ("server.secure_aggregation.identity", "secagg.identity", "fingerprint=key_fingerprint"),
    ("server.secure_aggregation.layout", "secagg.layout", "Arrays=NamedArrays"),
    ("server.secure_aggregation.leader", "secagg.additive_info", "share_info=leader_share_info"),
    ("server.secure_aggregation.pairwise", "secagg.pairwise", "PairwiseMasking=PairwiseMasks"),
    ("server.secure_aggregation.pairwise", "secagg.pairwise", "share_info=secret_share_info"),
    ("server.secure_aggregation.payload", "secagg.payload", "Aggregate=DecodedSum"),
    ("server.secure_aggregation.wire", "secagg.wire", "Record=WireRecord refuse=to_refusal"),
    ("server.secure_aggregation.wire", "secagg.wire", "VERSION=WIRE_VERSION"),
    ("server.secure_averaging", "server.secure.aggregator", "SecureAveraging=SecureAggregator"),
    ("server.secure_exchange", "server.secure.rounds", "Exchange=SecureRound Mail=QueryChannel"),
    ("server.secure_exchange", "server.secure.rounds", "SharedRound=AdditiveRound"),
    ("server.secure_exchange", "server.secure.rounds", "named=error_text"),
    ("server.secure_openings", "server.secure.opened_sums", "Opening=OpenedSum"),
    ("server.secure_openings", "server.secure.opened_sums", "Openings=OpenedSums"),
    ("server.secure_protocol", "protocol.secure", "answer=make_reply question=make_query"),
    ("server.strategies", "server.round_report", "Failure"),
)


def _expanded(moves: Sequence[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Return the new package or module and the new last name of each old path."""
    found = {}
    for old, new, names in moves:
        for name in names.split():
            before, _, after = name.partition("=")
            path = ".".join(filter(None, ("fedsim", old, before)))
            found[path] = (".".join(filter(None, ("fedsim", new))), after or before)
    return found


MOVED_MODULES = {old: f"{new}.{name}" for old, (new, name) in _expanded(_MODULE_MOVES).items()}
MOVED_NAMES = _expanded(_NAME_MOVES)


def moved_names_of(module: str, target: str | None = None) -> Callable[[str], object]:
    """Return the `__getattr__` of a module that public names have left.

    Args:
        module: the full path of the module.
        target: the path that the whole module moved to; None if it still exists.
    """

    def look_up(name: str) -> object:
        old = f"{module}.{name}"
        if old in MOVED_NAMES:
            new_module, new_name = MOVED_NAMES[old]
            _warn(old, f"{new_module}.{new_name}")
            return getattr(import_module(new_module), new_name)
        if target is not None:
            return getattr(import_module(target), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under the path that it had before it moved."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old path, None for any other.

        Args:
            fullname: path of the imported module.
            path: unused.
            target: unused.
        """
        if fullname not in MOVED_MODULES:
            return None
        has_modules = any(old.startswith(f"{fullname}.") for old in MOVED_MODULES)
        return ModuleSpec(fullname, self, is_package=has_modules)

    def exec_module(self, module: ModuleType) -> None:
        """Fill the old module: names that it lacks are looked up where they are now."""
        old, new = module.__name__, MOVED_MODULES[module.__name__]
        _warn(old, new)
        target = import_module(new)
        module.__doc__ = target.__doc__
        vars(module).update(__getattr__=moved_names_of(old, new), __dir__=lambda: dir(target))


def install() -> None:
    """Let imports of old paths find their modules; a second call changes nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: a folder that an old checkout left behind would be found as an empty package.
        sys.meta_path.insert(0, MovedModules())


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now {new}; the old name works until fedsim {_DROPPED_IN}",
        DeprecationWarning,
        stacklevel=3,
    )
