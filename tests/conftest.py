"""Settings of the whole suite, made before torch and numpy are imported."""

import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fedsim.clients.gradients.per_example import BatchStatistics

# The tests are many small computations: a second thread has nothing to do but wait, and on a busy
# machine waiting threads take the processor from everybody.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Some containers keep Python from writing bytecode: pytest would rewrite each test file in each of
# its processes, and each process that a test starts would compile the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A busy machine is slow, and that is no failure.
settings.register_profile("suite", max_examples=40, deadline=None)
settings.load_profile("suite")
# No test cuts the power, so none has to wait for the disk. Tests of what is forced to disk, and in
# which order, put a function of their own here.
os.fsync = lambda fd, /: None
# The key of digests of private data is made there.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedsim-state-")


class _StopAfter:
    """An observer that interrupts the run when a round is finished."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number

    def started(self, federation: object, path: Path) -> None: ...

    def round_finished(self, row: Mapping[str, Any]) -> None:
        if row["round"] == self._round:
            raise KeyboardInterrupt

    def ended(self) -> None: ...


class Logged(logging.Handler):
    """What fedsim logs, also as a node of Flower.

    Attributes:
        records: the records so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records = list[logging.LogRecord]()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    @property
    def text(self) -> str:
        """The messages, a line each."""
        return "\n".join(record.getMessage() for record in self.records)


def pytest_configure(config: pytest.Config) -> None:
    """Set the order of the files and run a test named by node id whatever its stage.

    pytest-xdist would start with the files of the most tests. A deployment is one long test that
    mostly waits: as the last one it would leave the second process idle.
    """
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist
        config.option.loadscopereorder = False
    is_default_stage = config.option.markexpr == config.getini("addopts")[-1]
    if is_default_stage and all("::" in argument for argument in config.args):
        config.option.markexpr = ""


# pytest-xdist gives each file to one of its processes: a long one that is begun last is waited for.
_LONG_FILES = (
    "tests/tools/deployment/test_deployment.py",
    "tests/docs/test_howto.py",
    "tests/simulation/ray/test_engine.py",
    "tests/simulation/ray/test_cluster.py",
    "tests/docs/test_tutorial.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first."""
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of searches for garbage: it stays to the end."""
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """Let no test depend on an earlier one: seed torch, and count released values anew."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed records its caller: slow
    if release := sys.modules.get("fedsim.noise.release"):
        release._DEMAND.values = 0  # beyond a number of values, noise is made by compiled code


@pytest.fixture
def logged() -> Iterator[Logged]:
    """Keep what fedsim logs. pytest's `caplog` is off: it costs each test two milliseconds."""
    handler, loggers = Logged(), [logging.getLogger(name) for name in ("fedsim", "flwr")]
    level = loggers[0].level
    loggers[0].setLevel(logging.DEBUG)
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
    loggers[0].setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def small_probe() -> Iterator[dict[str, int]]:
    """Let runs measure fewer values of noise before round 1, which was half of a small run.

    The false-alarm rate stays, and large faults are found. Tests of the probe use `whole_probe`.
    """
    from fedsim.federation import release_probes

    whole = {name: getattr(release_probes, name) for name in _PROBED_VALUES}
    with pytest.MonkeyPatch.context() as patch:
        for name in whole:
            patch.setattr(release_probes, name, 1 << 8)
        yield whole


_PROBED_VALUES = ("NUM_NOISE_VALUES", "MIN_CLIENT_VALUES")


@pytest.fixture
def whole_probe(small_probe: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs measure as many values of noise before round 1 as those of a user."""
    from fedsim.federation import release_probes

    for name, values in small_probe.items():
        monkeypatch.setattr(release_probes, name, values)


@pytest.fixture(scope="session")
def stop_after() -> Callable[[int], _StopAfter]:
    """Make observers that interrupt a run after a round."""
    return _StopAfter


@pytest.fixture(scope="session")
def execute_jobs() -> Callable[..., None]:
    """Perform the jobs of a comparison or search in this process, from the text that they are."""
    from fedsim.comparison.jobs import execute_here

    def execute(jobs: Any, *, log: Path, on_message: Any, **_: Any) -> None:
        execute_here(json.loads(json.dumps(jobs)), log=log, on_message=on_message)

    return execute


@pytest.fixture
def jobs_here(monkeypatch: pytest.MonkeyPatch, execute_jobs: Callable[..., None]) -> None:
    """Perform the runs of comparisons and searches in this process: another imports torch first."""
    from fedsim.comparison import compare
    from fedsim.tools.search import perform

    for module in (compare, perform):
        monkeypatch.setattr(module, "execute", execute_jobs)


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], dict[str, bytes]]:
    """Read the bytes of a run's model by name, without the words in the header of its file."""

    def read(run: Path) -> dict[str, bytes]:
        from safetensors.numpy import load_file

        return {name: one.tobytes() for name, one in load_file(run / "model.safetensors").items()}

    return read


@pytest.fixture(scope="session")
def outcome_of() -> Callable[[Path], dict[str, Any]]:
    """Read what a run leaves, by name, without times and the order of clients in the ledger."""

    def read(run: Path) -> dict[str, Any]:
        files = ("model.safetensors", "privacy.json", "clients.csv")
        rows = map(json.loads, (run / "rounds.jsonl").read_text().splitlines())
        return {
            **{name: (run / name).read_bytes() for name in files},
            "ledger": sorted((run / "ledger.jsonl").read_text().splitlines()),
            "rounds": [{**row, "seconds": 0, "timeline": {}} for row in rows],
        }

    return read


@pytest.fixture(scope="session")
def add_clipped_sum() -> "Callable[..., BatchStatistics]":
    """Add scale · Σ_i clip(gradient_i) of one client's examples to a float64 tensor (size,).

    `(gradients, features, targets, clipping, groups, into, scale=1.0) -> BatchStatistics`
    """
    import torch
    from torch import Tensor

    from fedsim.clients.clipping.clipping import Clipping, Groups
    from fedsim.clients.gradients.per_example import (
        BatchStatistics,
        ClipBounds,
        PaddedBatch,
        PerExampleGradients,
    )

    def add(
        gradients: PerExampleGradients,
        features: Tensor,
        targets: Tensor,
        clipping: Clipping,
        groups: Groups,
        into: Tensor,
        *,
        scale: float = 1.0,
    ) -> BatchStatistics:
        n = len(features)
        if n == 0:
            return BatchStatistics(0, 0, (0,) * len(groups.bounds))
        scales = torch.full((n, 1), scale, dtype=torch.float64, device=into.device)
        clip = ClipBounds(clipping, groups.members, scales.new_tensor([groups.bounds]), scales)
        data = gradients.parameters.data
        padded = PaddedBatch(1, features, targets, data.new_ones(n))
        rows = gradients.clipped(data.unsqueeze(0), padded, clip)
        rows.add_to(gradients.parameters.stacked_views(into.unsqueeze(0)))
        within = (rows.norms <= clip.bounds).sum(0).tolist()
        return BatchStatistics(n, int(rows.norms[:, 0].isnan().sum()), tuple(within))

    return add


@pytest.fixture(scope="session")
def secure_parties(_secagg_module: ModuleType) -> Callable[..., Any]:
    """Make the parties of secure aggregation: `(clients=6, shapes=..., **settings) -> Parties`."""
    return _secagg_module.make_parties


@pytest.fixture(scope="session")
def same_bits(_secagg_module: ModuleType) -> Callable[[Any, Any], bool]:
    """Whether two decoded sums are equal bit for bit."""
    return _secagg_module.same_bits


@pytest.fixture(scope="session")
def _secagg_module() -> ModuleType:
    """tests/secagg/parties.py, which tests of two rooms share; imported when used."""
    return _module_at(Path(__file__).parent / "secagg" / "parties.py")


@pytest.fixture(scope="session")
def saddle_point() -> ModuleType:
    """benchmarks/saddle_point.py: an ε that shares no error with the accountants."""
    path = Path(__file__).parents[1] / "benchmarks" / "saddle_point.py"
    if not path.exists():
        pytest.skip("imports a script of a checkout")
    return _module_at(path)


@pytest.fixture(scope="session")
def module_at() -> Callable[[Path], ModuleType]:
    """Import a file by its path; the folders of tests are no packages."""
    return _module_at


def _module_at(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class SharedRay:
    """One Ray for the tests of this process that are not about Ray's own start and end."""

    def __init__(self) -> None:
        self._patch, self._keeps_workers = pytest.MonkeyPatch(), False

    def start(self, processors: int, *, keep_workers: bool = False) -> None:
        """Start it if it is not there with so many processors; until `stop`, nothing ends it.

        Args:
            processors: their number.
            keep_workers: whether the processes of a run serve the next run.
        """
        import ray

        is_there = ray.is_initialized() and ray.cluster_resources().get("CPU") == processors
        if is_there and keep_workers == self._keeps_workers:
            return
        self.stop()
        ray.init(
            address="local",  # not that of other tests beside these
            num_cpus=processors,
            include_dashboard=False,
            object_store_memory=200 << 20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        # Flower's simulation ends the Ray that it used.
        self._patch.setattr(ray, "shutdown", lambda *_, **__: None)
        self._keeps_workers = keep_workers
        if keep_workers:
            path = Path(__file__).parent / "simulation" / "ray" / "kept_workers.py"
            _module_at(path).KeptWorkers(self._patch)

    def stop(self) -> None:
        """End it if it is there."""
        import ray

        if ray.is_initialized():
            self._patch.undo()
            ray.shutdown()


@pytest.fixture(scope="session")
def ray_of_the_process() -> Iterator[SharedRay]:
    pytest.importorskip("ray", reason="engines ray and flower need the extra `ray`")
    shared = SharedRay()
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def shared_ray(ray_of_the_process: SharedRay) -> None:
    """Have the engines of a module's tests use the Ray of this process, two processors for each.

    Its workers serve one run after another: each takes seconds to import what it needs.
    """
    ray_of_the_process.start(4, keep_workers=True)


@pytest.fixture(scope="module")
def no_ray(ray_of_the_process: SharedRay) -> None:
    """Have a module's tests start without a Ray in this process."""
    ray_of_the_process.stop()
