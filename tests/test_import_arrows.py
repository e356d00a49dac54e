"""Who may import whom: read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "hisparsim": ROOT / "sim/hisparsim",
    "hisparsim_traces": ROOT / "traces/hisparsim_traces",
    "hisparsim_kernels": ROOT / "kernels/hisparsim_kernels",
    "hisparsim_realrun": ROOT / "realrun/hisparsim_realrun",
    "hisparsim_reports": ROOT / "reports/hisparsim_reports",
}
MAY_IMPORT: dict[str, set[str]] = {
    "hisparsim_traces": set(),
    "hisparsim_kernels": set(),
    "hisparsim": {"hisparsim_traces"},
    "hisparsim_realrun": {"hisparsim", "hisparsim_kernels", "hisparsim_traces"},
    "hisparsim_reports": {"hisparsim"},
}
"""Package -> the project's other packages that it may import. The command line may reach all."""
CLI = "hisparsim.cli"


@cache
def sources() -> dict[str, Path]:
    """Dotted name -> file, of every module of the project."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(module: str, path: Path) -> Iterator[tuple[str, bool]]:
    """(what is imported, inside a function) of every import; what only type checkers see is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(other, inside)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                yield base, inside
                yield from ((f"{base}.{alias.name}", inside) for alias in child.names)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, inside or function)

    yield from walk(tree, False)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules_in(*packages: str) -> list[str]:
    return [module for module in sources() if any(within(module, package) for package in packages)]


@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_package_imports_only_those_that_it_may(package: str) -> None:
    forbidden = set(PACKAGES) - MAY_IMPORT[package] - {package}
    for module in modules_in(package):
        if within(module, CLI):
            continue
        for name, _ in imports(module, sources()[module]):
            assert name.split(".")[0] not in forbidden, f"{module} imports {name}"


def test_the_command_line_reaches_other_packages_only_inside_functions() -> None:
    for module in modules_in(CLI):
        for name, inside in imports(module, sources()[module]):
            other = name.split(".")[0] in set(PACKAGES) - {"hisparsim"}
            assert inside or not other, f"{module} imports {name} at the top"


def test_reports_read_results_and_nothing_else_of_the_simulator() -> None:
    for module in modules_in("hisparsim_reports"):
        for name, _ in imports(module, sources()[module]):
            if within(name, "hisparsim") and name != "hisparsim":
                assert within(name, "hisparsim.results"), f"{module} imports {name}"


def test_results_need_nothing_else_of_the_simulator() -> None:
    for module in modules_in("hisparsim.results"):
        for name, _ in imports(module, sources()[module]):
            if within(name, "hisparsim"):
                assert within(name, "hisparsim.results"), f"{module} imports {name}"


def test_decisions_know_neither_a_clock_nor_a_device_nor_a_price() -> None:
    for module in modules_in("hisparsim.serving"):
        for name, _ in imports(module, sources()[module]):
            assert name.split(".")[0] not in ("simpy", "torch", "triton", "time"), f"{module} imports {name}"
            for layer in ("cost", "des", "locality", "results", "cli", "sweep"):
                assert not within(name, f"hisparsim.{layer}"), f"{module} imports {name}"


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("specs", ("serving", "cost", "locality", "des", "results", "sweep", "cli")),
        ("locality", ("serving", "cost", "des", "results", "sweep", "cli")),
        ("cost", ("des", "results", "sweep", "cli")),
        ("des", ("sweep", "cli")),
    ],
)
def test_lower_layers_do_not_import_higher_ones(layer: str, forbidden: tuple[str, ...]) -> None:
    for module in modules_in(f"hisparsim.{layer}"):
        for name, _ in imports(module, sources()[module]):
            for other in forbidden:
                assert not within(name, f"hisparsim.{other}"), f"{module} imports {name}"


def test_only_the_clocks_package_imports_simpy_and_no_simulation_imports_torch() -> None:
    for module in modules_in("hisparsim", "hisparsim_traces", "hisparsim_reports"):
        for name, _ in imports(module, sources()[module]):
            top = name.split(".")[0]
            assert top not in ("torch", "triton"), f"{module} imports {name}"
            assert top != "simpy" or within(module, "hisparsim.des"), f"{module} imports {name}"


def loaded_by(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_heavy_library() -> None:
    assert not loaded_by("import hisparsim") & {"torch", "matplotlib", "pandas", "pyarrow", "numpy"}


def test_a_simulation_loads_neither_torch_nor_matplotlib_nor_pandas() -> None:
    statement = (
        "import hisparsim\n"
        "from hisparsim_traces import poisson\n"
        "hisparsim.simulate(hisparsim.Scenario.load(), poisson(3, 1.0, 100, 5, seed=0))"
    )
    assert not loaded_by(statement) & {"torch", "triton", "matplotlib", "pandas"}
