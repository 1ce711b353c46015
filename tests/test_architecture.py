"""The rules of docs/architecture.md that can be read off the source."""

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "magi_jax"

# Layers from the bottom up; layers of one row do not know each other.
LAYERS = (
    ("masks",),
    ("solver",),
    ("plan", "mesh"),
    ("ops",),
    ("comm",),
    ("parallel",),
    ("flax", "data", "testing"),
)
RANK = {layer: rank for rank, row in enumerate(LAYERS) for layer in row}
NUMPY_ONLY = ("masks", "solver")
# Rooms of the solver, likewise.
SOLVER_ROOMS = ("dispatch", "work", "cost", "overlap")

# Budgets of the style page: past them a file or function is usually two ideas.
MAX_FILE_LINES = {".py": 400, ".h": 500, ".cc": 500, ".cu": 500, ".cuh": 500}
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
CPP_FILES = sorted(p for p in (ROOT / "xla_ffi").rglob("*") if p.suffix in MAX_FILE_LINES)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATORS = {"append", "add", "update", "setdefault", "extend", "insert", "pop", "clear", "remove"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


python_files = pytest.mark.parametrize("path", PYTHON_FILES, ids=_name)


def _layer(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file imports, at whatever depth."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


@python_files
def test_imports_run_downward(path):
    layer = _layer(path)
    if layer is None:
        return
    assert layer in RANK, f"{_name(path)}: layer {layer!r} is not one of {sorted(RANK)}"
    for line, target in _imports(path):
        parts = target.split(".")
        if parts[0] == "magi_jax" and len(parts) > 1 and parts[1] in RANK and parts[1] != layer:
            assert RANK[parts[1]] < RANK[layer], f"{_name(path)}:{line}: {layer} imports {target}"


@pytest.mark.parametrize("room", SOLVER_ROOMS)
def test_rooms_of_the_solver_know_those_before_them(room):
    later = SOLVER_ROOMS[SOLVER_ROOMS.index(room) + 1 :]
    paths = sorted((PACKAGE / "solver" / room).glob("*.py"))
    assert paths, f"magi_jax/solver/{room} is gone"
    for path in paths:
        for line, target in _imports(path):
            assert (
                target.split(".")[:2] != ["magi_jax", "solver"] or target.split(".")[2] not in later
            ), f"{_name(path)}:{line}: {room} imports {target}"


@python_files
def test_masks_and_solver_import_numpy_alone(path):
    if _layer(path) not in NUMPY_ONLY:
        return
    allowed = sys.stdlib_module_names | {"numpy", "magi_jax"}
    for line, target in _imports(path):
        assert target.split(".")[0] in allowed, f"{_name(path)}:{line}: imports {target}"


def test_planning_process_loads_no_jax():
    code = "import sys, magi_jax.masks, magi_jax.solver; print('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


@python_files
def test_python_reads_no_environment(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            where = f"{_name(path)}:{node.lineno}"
            assert node.attr not in ("environ", "getenv", "putenv"), (
                f"{where}: reads the environment"
            )


@pytest.mark.parametrize("path", CPP_FILES, ids=_name)
def test_cpp_reads_no_environment(path):
    assert not re.search(r"\bgetenv\b", path.read_text()), f"{_name(path)}: reads the environment"


@python_files
def test_no_module_level_mutable_state(path):
    """Nothing is rebound with ``global``; tables are in capitals and nobody changes them."""
    tree = ast.parse(path.read_text())
    tables = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        called = getattr(getattr(value, "func", None), "id", None)
        if isinstance(value, MUTABLE_NODES) or called in MUTABLE_CALLS:
            for target in targets:
                name = getattr(target, "id", "")
                constant = name.isupper() or name == "__all__"
                assert constant, f"{_name(path)}:{node.lineno}: mutable {name!r} at module level"
                tables.add(name)
    for node in ast.walk(tree):
        where = f"{_name(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), f"{where}: global"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert getattr(node.value, "id", None) not in tables, (
                f"{where}: changes a module's table"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in MUTATORS and getattr(node.func.value, "id", None) in tables
            assert not changes, f"{where}: changes a module's table"


def _public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            overloaded = any("overload" in ast.dump(decorator) for decorator in node.decorator_list)
            if not overloaded:
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node.body, f"{prefix}{node.name}.")


@python_files
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    missing = [name for name, node in _public_definitions(tree.body) if not ast.get_docstring(node)]
    if tree.body and not ast.get_docstring(tree):
        missing.append("the module itself")
    assert not missing, f"{_name(path)}: no docstring on {', '.join(missing)}"


def _build_targets() -> list[tuple[str, list[str]]]:
    """Names and sources of the targets in BUILD, which is read as the Python that it also is."""
    targets = []

    def rule(name, srcs=(), hdrs=(), **_):
        targets.append((name, [*srcs, *hdrs]))

    def glob(include, exclude=()):
        found = {
            path.relative_to(ROOT).as_posix() for pattern in include for path in ROOT.glob(pattern)
        }
        return sorted(
            found - {p.relative_to(ROOT).as_posix() for e in exclude for p in ROOT.glob(e)}
        )

    rules = ("py_library", "py_binary", "py_test", "cc_library", "cc_binary", "filegroup")
    scope = {name: rule for name in rules} | {"glob": glob, "package": lambda **_: None}
    exec(compile((ROOT / "BUILD").read_text(), "BUILD", "exec"), scope)
    return targets


def test_every_source_is_in_exactly_one_build_target():
    listed = Counter(source for _, sources in _build_targets() for source in sources)
    folders = ("magi_jax", "xla_ffi", "tests", "examples", "benchmarks", "tools")
    sources = {
        _name(p) for f in folders for p in (ROOT / f).rglob("*") if p.suffix in MAX_FILE_LINES
    }
    assert not sorted(sources - set(listed)), "in no target of BUILD"
    assert not sorted(set(listed) - sources), "in BUILD, but no such file"
    assert not [source for source, count in listed.items() if count > 1], "in several targets"


def test_names_of_test_files_are_unique():
    """pytest and tests import files by their bare name, so that of two the wrong one might come."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    names = Counter(path.name for path in files)
    shared = {"conftest.py", "__init__.py"}
    assert not [name for name, count in names.items() if count > 1 and name not in shared]


@pytest.mark.filterwarnings("always")
def test_budgets_are_shown_as_warnings():
    for path in [*PYTHON_FILES, *CPP_FILES]:
        lines = path.read_text().count("\n")
        if lines > MAX_FILE_LINES[path.suffix]:
            warnings.warn(f"{_name(path)} has {lines} lines", stacklevel=1)
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTIONS):
                where = f"{_name(path)}:{node.lineno}: {node.name}"
                documented = ast.get_docstring(node) is not None
                body = node.body[1:] if documented else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                arguments = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                if lines > MAX_FUNCTION_LINES:
                    warnings.warn(f"{where} has {lines} lines", stacklevel=1)
                if arguments > MAX_ARGUMENTS:
                    warnings.warn(f"{where} has {arguments} arguments", stacklevel=1)
