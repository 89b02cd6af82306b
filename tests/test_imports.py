"""Who may import whom, and what must not be loaded before it is used."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sim

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("traces", "sim", "executor")
HEAVY = ("torch", "transformers", "pandas", "pyarrow", "numpy", "simpy", "matplotlib")

# The one place of `sim` that may know the executor (and only when a command that needs it is called) ...
COMMAND_LINE = frozenset({"sim/cli/runs.py"})
# ... and the places of the executor that may use the simulator's engine and search.
USES_ENGINE = frozenset({"executor/commands.py", "executor/demo.py", "executor/training/automatic.py"})


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def package_of(path: Path) -> list[str]:
    return list(path.relative_to(ROOT).parent.parts)


def imported_modules(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module a source imports, with whether it does so when it is itself imported."""

    def names(node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        package = package_of(path)
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((name, at_import) for name in names(child))
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            only_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from visit(child, at_import and not deferred and not only_types)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


def faults(
    package: str, forbidden: tuple[str, ...], *, exempt: set[str] = frozenset(), deferred_too: bool
) -> list[str]:
    found = []
    for path in sources(package):
        where = path.relative_to(ROOT).as_posix()
        if where in exempt:
            continue
        for module, at_import in imported_modules(path):
            hit = any(module == name or module.startswith(f"{name}.") for name in forbidden)
            if hit and (deferred_too or at_import):
                found.append(f"{where} imports {module}")
    return found


def test_every_package_has_sources() -> None:
    assert all(sources(package) for package in PACKAGES)


def test_traces_import_neither_simulator_nor_executor() -> None:
    assert not faults("traces", ("sim", "executor", "torch", "simpy"), deferred_too=True)


def test_sim_never_imports_torch_or_the_executor() -> None:
    assert not faults("sim", ("torch", "transformers", "executor"), exempt=COMMAND_LINE, deferred_too=True)


def test_command_line_loads_the_executor_only_when_used() -> None:
    assert not faults("sim", ("torch", "transformers", "executor"), deferred_too=False)


def test_executor_uses_nouns_not_the_engine() -> None:
    engine = ("sim.engine", "sim.planner", "sim.builders", "simpy")
    assert not faults("executor", engine, exempt=USES_ENGINE, deferred_too=True)


def test_nothing_imports_tests_or_notebooks() -> None:
    assert not [fault for package in PACKAGES for fault in faults(package, ("tests", "notebooks"), deferred_too=True)]


def test_the_parser_sees_relative_and_deferred_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above rest on this: each way to write an import is seen, and where it is executed."""
    module = tmp_path / "sim" / "views" / "made_up.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from ..engine import simulate\nfrom .. import planner\nimport executor.running.run as run\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def late():\n    from executor import demo\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    seen = set(imported_modules(module))
    expected = {("sim.engine.simulate", True), ("sim.planner", True), ("executor.running.run", True), ("torch", False)}
    assert expected | {("executor.demo", False)} <= seen


def loaded_after(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after running ``code``."""
    program = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_importing_sim_loads_nothing_heavy() -> None:
    assert loaded_after("import sim, traces, traces.files, sim.hardware.files, sim.schedule_files") == set()


def test_help_loads_nothing_heavy() -> None:
    assert loaded_after("from sim.cli.app import app\napp(['--help'], standalone_mode=False)") == set()


def test_simulating_needs_no_torch() -> None:
    used = "import sim\nsim.simulate, sim.compare, sim.build, sim.plot_lanes, sim.search, sim.load_trace"
    assert loaded_after(used) & {"torch", "transformers"} == set()


def test_sim_without_torch_installed() -> None:
    """A torch that cannot be imported stands for one that is not installed."""
    code = "import sys\nsys.modules['torch'] = None\nimport sim\nprint(sim.load_machine('4x1080ti').name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "4x1080ti\n"


def test_no_module_hides_a_public_name() -> None:
    """Importing a module binds its name in the package."""
    assert not {module.name for module in pkgutil.iter_modules(sim.__path__)} & set(sim.__all__)


def test_public_names_resolve() -> None:
    code = "import sim\nassert set(sim.__all__) <= set(dir(sim))\nfor name in sim.__all__: getattr(sim, name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_type_checkers_see_the_names_that_users_see() -> None:
    tree = ast.parse((ROOT / "sim" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names - {"Any"} == set(sim.__all__)
