"""The architecture that docs/design.md promises, read off the source."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the ground up. A room may import the rooms of lower floors, and itself; rooms of one floor do
# not import each other. `fedsim/x.py` counts as the room `x`.
FLOORS: tuple[set[str], ...] = (
    {"core"},
    {"accountant"},
    {"noise", "secagg", "zeroth_order"},
    {"protocol"},
    {"algorithms"},
    {"clients", "server"},
    {"data", "simulation", "statement"},
    {"models"},
    {"pate", "personalization"},
    {"experiment"},
    {"federation"},
    {"tracking"},
    {"runs"},
    {"planning"},
    {"report"},
    {"comparison"},
    {"api", "catalog", "profiling", "setting_tables", "testing"},
    {"starter"},
    {"cli"},
    {"tools"},
    {"__main__", "reference"},
)
REGISTRY = "fedsim.cli.registry"  # names the tools as text, for the command line
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PACKAGES = {  # directory: import name
    "fedsim": "fedsim",
    "clients": "fedsim.clients",
    "server": "fedsim.server",
    "accountant": "fedsim.accountant",
}
MAX_FLAT_FILES = 14

in_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="reads the source of a checkout"
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def modules() -> dict[str, Path]:
    """Return every module by its import name."""
    found = {}
    for directory, package in PACKAGES.items():
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = path.relative_to(ROOT / directory).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, inside functions and for types included.

    A place of a catalogue, "package.module:name", is an import, too.
    """
    known = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = graph[module] = set[str]()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative import"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.add(inner if inner in known else node.module or "")
            elif isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                targets.add(node.value.partition(":")[0])
        targets &= known.keys() - {module}
    return graph


def room_of(module: str) -> str:
    return module.split(".")[1]


def against_the_floors(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that do not point to a lower floor."""
    return [
        f"{module} imports {target}"
        for module, targets in graph.items()
        if module != "fedsim"
        for target in targets - {"fedsim"}
        if room_of(module) != room_of(target)
        and not (module == REGISTRY and room_of(target) == "tools")
        and FLOOR_OF[room_of(module)] <= FLOOR_OF[room_of(target)]
    ]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves by way of others (empty: there is an order)."""
    left = {module: set(targets) for module, targets in graph.items()}
    while leaves := {module for module, targets in left.items() if not targets}:
        left = {module: left[module] - leaves for module in left.keys() - leaves}
    return sorted(left)


def without_facades(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without each `__init__.py` that only names for users what is inside."""
    facades = {
        module
        for module, path in modules().items()
        if path.name == "__init__.py" and not defines_something(path)
    }
    return {module: graph[module] - facades for module in graph.keys() - facades}


def defines_something(path: Path) -> bool:
    """Return whether a file has classes or functions; `__getattr__` only finds names of others."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    body = tree_of(path).body
    return any(isinstance(node, kinds) and not node.name.startswith("__") for node in body)


@in_checkout
def test_imports_point_to_lower_floors() -> None:
    assert against_the_floors(import_graph()) == []


@in_checkout
def test_no_circles_between_files() -> None:
    assert circles(without_facades(import_graph())) == []


@in_checkout
def test_no_module_of_the_core_and_no_other_tool_imports_a_tool() -> None:
    """But `fedsim`, which names the search for users, and the registry of the command line."""
    inside = {
        (module, target)
        for module, targets in import_graph().items()
        for target in targets
        if target.startswith("fedsim.tools.") and tool_of(module) != tool_of(target)
    }
    assert {module for module, _ in inside} == {"fedsim", REGISTRY}, inside


def tool_of(module: str) -> str:
    """Return `fedsim.tools.search` for `fedsim.tools.search.plan`."""
    return ".".join(module.split(".")[:3])


def test_the_checks_of_floors_and_circles_can_fail() -> None:
    assert against_the_floors({"fedsim.clients.app": {"fedsim.server.app"}})
    assert against_the_floors({"fedsim.core.errors": {"fedsim.runs.runner"}})
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


@in_checkout
@pytest.mark.parametrize("directory", ["clients", "server", "accountant"])
def test_few_files_lie_flat(directory: str) -> None:
    flat = sorted(path.name for path in (ROOT / directory).glob("*.py"))
    assert len(flat) <= MAX_FLAT_FILES, flat


@in_checkout
def test_every_room_is_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    for room in FLOOR_OF:
        assert re.search(rf"\b{room}\b", design), room


@in_checkout
def test_the_accountant_needs_numpy_and_scipy_only() -> None:
    for path in (ROOT / "accountant").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in {*sys.stdlib_module_names, "numpy", "scipy", "fedsim"}, f"{path}: {name}"


@in_checkout
def test_oracles_are_never_imported_at_run_time() -> None:
    for room in PACKAGES:
        for path in (ROOT / room).rglob("*.py"):
            for name in imports(path):
                assert name.split(".")[0] not in {"dp_accounting", "mpmath", "opacus"}, path


@in_checkout
def test_flowers_private_modules_are_touched_in_one_place() -> None:
    private = ("flwr.common", "flwr.supercore", "flwr.server.", "flwr.compat")
    for room in PACKAGES:
        for path in (ROOT / room).rglob("*.py"):
            if path.name != "flower_internals.py":
                assert not any(name.startswith(private) for name in imports(path)), path


@in_checkout
def test_a_public_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for directory in PACKAGES:
        for path in (ROOT / directory).rglob("*.py"):
            if "starter" in path.parts:
                continue
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@in_checkout
def test_every_package_is_listed() -> None:
    """One missing from the list works in a checkout and is absent from the wheel."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {
        ("" if top == "fedsim" else "fedsim.") + ".".join(path.parent.relative_to(ROOT).parts)
        for top in config["package-dir"].values()
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert on_disk == set(config["packages"])


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("fedsim.fedsim.core.errors", "fedsim"),
        *((name, f"fedsim.{name}") for name in ("clients", "server", "accountant")),
        *((f"fedsim.fedsim.{name}", "fedsim") for name in ("clients", "server", "accountant")),
    ],
)
@in_checkout
def test_each_module_has_one_name(module: str, name: str) -> None:
    """A second copy has other classes, which no `except` and no `isinstance` of the first finds."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"ImportError: import {name}, not " in result.stderr


HEAVY = "{'torch', 'flwr', 'ray', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)"


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(
        "name: light\n"
        "data: {dataset: digits, partition: {scheme: iid, num_clients: 2}}\n"
        "model: {name: mlp}\nfederation: {rounds: 1}\nlocal: {steps: 1, batch_size: 8}\n"
        "privacy: null\n"
    )
    code = (
        "import sys\n"
        "from fedsim.cli import main\n"
        "for line in ('--help', 'run --help', 'validate ' + sys.argv[1], 'schema', 'list'):\n"
        "    sys.argv[:] = ['fedsim', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, (line, end.code)\n"
        f"    assert not ({HEAVY}), (line, {HEAVY})\n"
    )
    python(code, str(file))


START = """
import sys
import fedsim

settings = {
    "name": "light",
    "data": {"dataset": "digits", "partition": {"scheme": "iid", "num_clients": 2}},
    "model": {"name": "logistic"},
    "federation": {"rounds": 1},
    "local": {"steps": 1, "batch_size": "full"},
    "privacy": {"target_epsilon": 8.0, "delta": 1e-3, "max_grad_norm": 0.5},
}
fedsim.run(settings, out=sys.argv[1])
slow = {
    "fedsim.comparison", "matplotlib", "scipy.optimize", "scipy.signal", "scipy.stats", "sklearn",
    "sympy", "torch._dynamo",
}
unused = {
    "fedsim.algorithms.built_in.scaffold", "fedsim.clients.secure.channel",
    "fedsim.data.builtin.mnist", "fedsim.data.tables.dataset",
    "fedsim.personalization.personalize", "fedsim.runs.saved_model", "fedsim.secagg.messages",
    "fedsim.server.secure.aggregator", "fedsim.tools", "fedsim.tracking.wandb",
}
print(sorted((slow | unused) & set(sys.modules)))
"""


@pytest.mark.slow  # four seconds: a run in another process
def test_a_private_run_with_its_report_imports_nothing_slow_or_unused(tmp_path: Path) -> None:
    """A compiler, solvers and a library of figures took longer to import than torch itself."""
    assert python(START, str(tmp_path / "run")).strip() == "[]"


def test_telemetry_is_off_unless_the_user_turned_it_on() -> None:
    names = ["FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "RAY_USAGE_STATS_ENABLED"]
    code = (
        "import os\n"
        f"for name in {names}: os.environ.pop(name, None)\n"
        "import fedsim\n"
        f"print([os.environ[name] for name in {names}])"
    )
    assert python(code).strip() == "['0', '1', '0']"
    kept = "import os; os.environ['FLWR_TELEMETRY_ENABLED'] = '1'; import fedsim; "
    assert python(kept + "print(os.environ['FLWR_TELEMETRY_ENABLED'])").strip() == "1"


def room_arrows(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms that each room imports, without those that follow from the others."""
    arrows: dict[str, set[str]] = {room: set() for room in FLOOR_OF}
    for module, targets in graph.items():
        if module != "fedsim":
            rooms = {room_of(target) for target in targets - {"fedsim"}}
            arrows[room_of(module)] |= rooms - {room_of(module)}

    def reachable(room: str) -> set[str]:
        return arrows[room].union(*map(reachable, arrows[room])) if arrows[room] else set()

    return {
        room: {one for one in direct if not any(one in reachable(other) for other in direct)}
        for room, direct in arrows.items()
    }


def draw_rooms(path: Path) -> None:
    """Draw the rooms, floor by floor, with an arrow from each room to the rooms that it imports."""
    from matplotlib import pyplot

    place = {
        room: ((index - (len(rooms) - 1) / 2) * 1.5, floor)
        for floor, rooms in enumerate(FLOORS)
        for index, room in enumerate(sorted(rooms))
    }
    figure, axes = pyplot.subplots(figsize=(9, 11))
    axes.axis("off")
    axes.set(xlim=(-4, 4), ylim=(-0.5, len(FLOORS) - 0.5))
    for room, targets in room_arrows(import_graph()).items():
        for target in targets:
            style = {"arrowstyle": "->", "color": "0.6", "connectionstyle": "arc3,rad=0.25"}
            style |= {"shrinkA": 12, "shrinkB": 12}
            axes.annotate("", place[target], place[room], arrowprops=style)
    for room, (x, y) in place.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.3"}
        axes.text(x, y, room, ha="center", va="center", bbox=box, family="monospace")
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":  # python tests/test_architecture.py rooms.svg
    draw_rooms(Path(sys.argv[1]))


# Where a kind of private release is named beside its own folder and the registry; see CONTRIBUTING.
NAMES_KINDS = {
    "clients/privacy_settings.py": "its settings",
    "clients/training/": "steps of DP-SGD, in the loop of a block and of its members",
    "fedsim/tools/attack": "canaries in gradients and in updates",
    "fedsim/comparison/variants.py": "arms that change the mechanism",
    "fedsim/experiment/rules/mechanisms.py": "conditions of the proofs",
    "fedsim/federation/blocks.py": "padded batches of steps of DP-SGD",
    "fedsim/federation/release_probes.py": "one probe for each kind",
    "fedsim/federation/plan.py": "what a plan needs of the model",
    "fedsim/statement/mechanism.py": "one sentence for each kind",
    "fedsim/testing.py": "a mechanism for users' own tests",
}
KIND_NAMES = re.compile(
    r"\b(DpSgdMechanism|UpdateMechanism|VoteMechanism|OutputMechanism|InputMechanism)\b"
    r"|\"(dp_sgd|client_update|output_perturbation|input_perturbation)\""
)


@in_checkout
def test_a_kind_of_release_is_named_in_its_folder_and_registry_only() -> None:
    own = ("clients/mechanisms/", "clients/privacy_engine/")
    naming = {
        place
        for directory in PACKAGES
        for path in (ROOT / directory).rglob("*.py")
        if not (place := path.relative_to(ROOT).as_posix()).startswith(own)
        and KIND_NAMES.search(path.read_text())
    }
    allowed = {place for place in naming if place.startswith(tuple(NAMES_KINDS))}
    assert naming == allowed
    assert all(any(one.startswith(place) for one in naming) for place in NAMES_KINDS)
