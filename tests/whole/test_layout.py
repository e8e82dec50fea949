"""The house rules, read from the source by ``ast``: floors, sizes, docstrings, private torch modules, public face."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fpipe

ROOT = Path(fpipe.__file__).parent

#: The packages and modules directly in ``fpipe/``, lowest first. Each imports only from those above it in this table.
LAYERS = {
    "_version": "the version",
    "errors": "exceptions",
    "schedules": "schedules as data: rule of dependence, text, check, simulation, pictures",
    "schedule": "the public value: Action, Fused, Placement, Schedule",
    "generators": "the catalogue of schedules, and comparison of them",
    "tree": "pytrees and abstract leaves",
    "specs": "shape, strides and dtype of a tensor as it is sent",
    "devices": "devices as records",
    "collectives": "groups, messages, faults, capabilities",
    "stage": "the public value: Stage, remat",
    "programs": "a function -> F, B, I, W",
    "plans": "schedule + programs -> the instructions of one rank",
    "running": "one call: prepare, feed, run, results",
    "transforms": "gradient transforms",
    "interop": "other people's models, trainers, files",
    "testing": "fake groups and the conformance suite",
    "command": "the command line, launching, the demo",
    "__main__": "python -m fpipe",
}
LEVEL = {name: level for level, name in enumerate(LAYERS)}
TORCH_FREE = {"_version", "errors", "schedules", "schedule", "generators"}

#: The only files that may touch private parts of torch, and which; each is small, so that a new torch is soon met.
PRIVATE_TORCH: dict[str, set[str]] = {
    "programs/_fake.py": {"torch._subclasses", "torch._ops"},
    "programs/_functorch.py": {"torch._C"},
    "programs/_marks.py": {"torch.autograd._get_sequence_nr"},
    "collectives/ops.py": {"torch.ops._c10d_functional"},
    "programs/_purity.py": {"torch._subclasses", "torch._ops", "torch.utils._python_dispatch"},
    "collectives/_store.py": {
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._resolve_process_group",
    },
    "interop/_modes.py": {"torch.utils._python_dispatch"},
    "programs/program.py": {"torch._ops"},
}
PRIVATE_FILE_LINES = 250
#: Underscored, and yet in torch's documentation.
DOCUMENTED = ("torch._foreach_", "torch._fused_")


def modules() -> dict[str, Path]:
    """Dotted name below ``fpipe`` -> file; the face itself is left out."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


MODULES = modules()


@cache
def source(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a module imports, wherever in the file, each with its line.

    What only type checkers read is not imported.
    """
    unread = {id(node) for block in ast.walk(source(name)) if for_types(block) for node in ast.walk(block)}
    package = MODULES[name].name == "__init__.py"
    here = ["fpipe", *name.split(".")]
    for node in ast.walk(source(name)):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - package
            base = here[: len(here) - up] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((".".join([*base, alias.name]), node.lineno) for alias in node.names)


def inner(name: str) -> Iterator[tuple[str, int]]:
    """The modules of fpipe that a module imports, by their longest known name."""
    for target, line in imports(name):
        if target == "fpipe" or not target.startswith("fpipe."):
            continue
        parts = target.split(".")[1:]
        known = [".".join(parts[:k]) for k in range(len(parts), 0, -1) if ".".join(parts[:k]) in MODULES]
        yield (known[0] if known else parts[0]), line


@pytest.mark.parametrize("name", MODULES)
def test_layer(name: str):
    package = name.split(".")[0]
    assert package in LEVEL, f"{name} is in no layer: add {package} to LAYERS"
    for target, line in inner(name):
        other = target.split(".")[0]
        assert other == package or LEVEL.get(other, 99) < LEVEL[package], f"{name}:{line} imports {target} from below"


@pytest.mark.parametrize("name", MODULES)
def test_imports_no_face(name: str):
    faces = [line for target, line in imports(name) if target == "fpipe" or target in FACE_NAMES]
    assert not faces, f"{name}:{faces} imports the public face; import the module that defines the name"


FACE_NAMES = {f"fpipe.{public}" for public in fpipe.__all__ if public not in MODULES}


def test_no_circles():
    graph = {name: {target for target, _ in inner(name)} - {name} for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[0] in TORCH_FREE])
def test_lower_half_is_torch_free(name: str):
    used = [line for target, line in imports(name) if target.split(".")[0] in ("torch", "optree", "numpy")]
    assert not used, f"{name}:{used} imports torch, optree or numpy"


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name: str):
    lines = MODULES[name].read_text(encoding="utf-8").count("\n")
    assert lines < 400, f"{name} has {lines} lines"
    for node in ast.walk(source(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length < 60, f"{name}:{node.lineno} {node.name} has {length} lines"


def overloaded(node: ast.AST) -> bool:
    return any(ast.unparse(mark).endswith("overload") for mark in getattr(node, "decorator_list", ()))


def undocumented(name: str) -> Iterator[str]:
    tree = source(name)
    if not ast.get_docstring(tree):
        yield f"{name}: the module"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body if not name.split(".")[-1].startswith("_") else ():
        if not isinstance(node, kinds) or node.name.startswith("_") or overloaded(node):
            continue
        if not ast.get_docstring(node):
            yield f"{name}:{node.lineno} {node.name}"
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, kinds) and not member.name.startswith("_") and not ast.get_docstring(member):
                yield f"{name}:{member.lineno} {node.name}.{member.name}"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str):
    assert not list(undocumented(name))


def private_torch(name: str) -> Iterator[tuple[str, int]]:
    """Private parts of torch that a file imports or reaches by a dotted name."""
    for target, line in imports(name):
        parts = target.split(".")
        if parts[0] == "torch" and any(part.startswith("_") for part in parts):
            yield target, line
    for node in ast.walk(source(name)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            dotted = ast.unparse(node)
            if dotted.startswith("torch.") and not dotted.startswith(DOCUMENTED):
                yield dotted, node.lineno


@pytest.mark.parametrize("name", MODULES)
def test_private_torch(name: str):
    path = MODULES[name].relative_to(ROOT).as_posix()
    allowed = PRIVATE_TORCH.get(path, set())
    used = list(private_torch(name))
    wrong = [(target, line) for target, line in used if not any(target.startswith(part) for part in allowed)]
    assert not wrong, f"{path} touches private torch {wrong}: move it to a small file listed in PRIVATE_TORCH"
    for part in allowed:
        assert any(target.startswith(part) for target, _ in used), f"{path} no longer uses {part}"
    if allowed:
        assert MODULES[name].read_text(encoding="utf-8").count("\n") <= PRIVATE_FILE_LINES


# ---- the public face ------------------------------------------------------------------------------------------------
def test_face_and_type_checkers_see_the_same():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        (alias.asname, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == {
        *fpipe._FACE.items(),
        *((name, module.rpartition(".")[0] or None) for name, module in fpipe._MODULES.items()),
    }


@pytest.mark.parametrize("name", fpipe.__all__)
def test_face_resolves(name: str):
    assert getattr(fpipe, name) is not None
    assert name in dir(fpipe)


def test_face_refuses_with_a_word():
    with pytest.raises(AttributeError, match="no attribute 'pipline'"):
        fpipe.pipline  # noqa: B018


def test_no_function_and_module_share_a_name():
    """``import fpipe.x as m`` would give the function, and the lazy face the module."""
    files = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert not files & set(fpipe._FACE)
    assert {module.split(".")[0] for module in fpipe._MODULES.values()} <= files


def test_lower_half_loads_without_torch():
    """A face that imports torch takes seconds to answer ``fpipe draw``; it takes milliseconds without."""
    lazy = sorted(name for name, module in fpipe._FACE.items() if module.split(".")[0] in TORCH_FREE)
    code = (
        f"import sys, fpipe; [getattr(fpipe, n) for n in {lazy}]; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]
