"""The layout of the library, checked on its source: packages and their imports, sizes, docstrings,
private names.

``PACKAGES`` is the map of the library. ``structure.py`` (in tests/helpers) reads the source and
counts.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from inspect import unwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fpipe
from structure import Function, Module, Package, length

ROOT = Path(fpipe.__file__).parent
PACKAGE = Package(ROOT)
MODULES = {name: module for name, module in PACKAGE.modules.items() if name}
FILE_NAMES = {module.path.stem for module in MODULES.values()}


class Entry(NamedTuple):
    """A package or module directly in ``fpipe/``: its purpose, what it must not depend on, all that
    it may import.
    """

    purpose: str
    must_not_know: str
    may_import: str


#: Lowest first: each may import only from those above it, and exactly the ones named.
PACKAGES = {
    "errors": Entry("exceptions", "everything else", ""),
    "tree": Entry("pytrees and abstract tensors", "everything else", ""),
    "devices": Entry("devices as records", "everything else", "errors"),
    "actions": Entry("rule of dependence, text, check, simulation, costs", "torch", "errors"),
    "schedule": Entry(
        "public values: Action, Fused, Placement, Schedule", "torch", "actions errors"
    ),
    "generators": Entry("the catalogue of schedules", "torch", "actions errors schedule"),
    "stage": Entry("public value: Stage, remat", "programs, ranks", "errors"),
    "collectives": Entry(
        "groups, messages, faults, capabilities", "schedules, programs", "devices errors tree"
    ),
    "programs": Entry(
        "a function -> its programs F, B, I, W",
        "ranks, schedules",
        "actions errors stage tree",
    ),
    "lowering": Entry(
        "schedule + programs -> the instructions of one rank",
        "tensors, backends",
        "actions collectives programs schedule tree",
    ),
    "engine": Entry(
        "one call: configuration, preparation, feed, loop, results",
        "names of schedules, kinds of backends",
        "actions collectives devices errors generators lowering programs schedule stage tree",
    ),
    "passes": Entry(
        "features that most pipelines do not use",
        "products",
        "actions collectives devices engine errors generators lowering programs schedule "
        "stage tree",
    ),
    "transforms": Entry(
        "gradient transforms, (init, update)",
        "schedules",
        "collectives devices errors programs tree",
    ),
    "saving": Entry(
        "checkpoints, whole weights",
        "how a pipeline runs",
        "actions collectives engine errors passes stage tree",
    ),
    "testing": Entry("fake groups and faults", "schedules, programs", "collectives errors tree"),
    "products": Entry(
        "pictures, search, clusters, training, the command line",
        "interop",
        "actions collectives devices errors generators programs saving schedule transforms tree",
    ),
    "interop": Entry(
        "other people's models, trainers, files",
        "lowering",
        "collectives errors programs saving schedule stage tree",
    ),
    "__main__": Entry("python -m fpipe", "", "products"),
}
#: What is built on the library, and what no other part may import.
PRODUCTS = {"products", "interop"}
#: What imports public names alone.
PUBLIC_ONLY = (
    "interop",
    "products.clusters",
    "products.command",
    "products.demo",
    "products.explanation",
    "products.search",
    "products.training",
)
TORCH_FREE = {name for name, entry in PACKAGES.items() if entry.must_not_know == "torch"} | {
    "errors"
}

#: The files that may use private names of torch, or of another library, and which names.
PRIVATE_TORCH = {
    "products.clusters.decoder": {"_scaled_dot_product_flash_attention_for_cpu"},
    "collectives._store": {"_get_default_store", "_resolve_process_group", "_set_pg_timeout"},
    "passes.compilers": {"_inductor"},
    "passes.ops": {"_c10d_functional"},
    "interop.binding": {"_backward_hooks", "_post_accumulate_grad_hooks"},
    "interop.module_function": {
        "_buffers",
        "_disable_current_modes",
        "_modules",
        "_parameters",
        "_python_dispatch",
    },
    "interop.huggingface.recording": {"_python_dispatch"},
    "interop.replacements": {"_compiled_call_impl"},
    "interop.huggingface.splitting": {"_experts_implementation"},
    "interop.pipelining.orders": {"_Action", "_add_send_recv"},
    "passes.blocks.outside": {"_python_dispatch", "_disable_current_modes"},
    "passes.eager.meter": {"_input_metadata", "_raw_saved_"},
    "passes.explain": {"_get_current_function_mode_stack", "_subclasses"},
    "passes.first_mode": {"_subclasses"},
    "passes.sizes.formulas": {"_unsafe_view"},
    "passes.sizes.symbols": {
        "_C",
        "_decomp",
        "_dispatch",
        "_dispatch_has_kernel_for_dispatch_key",
        "_get_dispatch",
        "_guards",
        "_meta_registrations",
        "_ops",
        "_sym_sqrt",
        "_sympy",
        "_uncache_dispatch",
    },
    "passes.writes": {"_opname", "_overloadname", "_schema"},
    "engine.option_checks": {"_value"},  # an argument of a call
    "programs.internals": {
        "_get_cudnn_enabled",
        "_get_current_function_mode_stack",
        "_get_mkldnn_enabled",
        "_C",
        "_are_functorch_transforms_active",
        "_c10d_functional",
        "_cdata",
        "_current_level",
        "_op",
        "_opname",
        "_ops",
        "_python_dispatch",
        "_schema",
        "_subclasses",
    },
    "programs.tensor_state": {"_C", "_functorch", "_is_zerotensor", "_version"},
    "transforms.foreach": {"_foreach_"},
}
PRIVATE_FILE_TOKENS = 2300
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
#: Underscored, and yet documented: fused updates of torch, named tuples, os._exit.
DOCUMENTED = re.compile(r"_foreach_\w+|_fused_\w+|_replace|_asdict|_fields|_make|_exit|__\w+__|_")


def report(found: object) -> str:
    return "\n".join(map(str, found)) if isinstance(found, list) else str(found)


# ---- packages ----
def test_entries():
    files, folders = PACKAGE.entries
    assert {Path(name).stem for name in files} | set(folders) == {*PACKAGES, "__init__"}
    assert len(files) <= 6
    assert len(folders) <= 13


def test_packages_import_what_the_table_names():
    """Type-only imports included; neither more than the table names, nor less."""
    graph = PACKAGE.entry_graph()
    imported = {name: graph.get(name, set()) for name in PACKAGES}
    differ = [
        f"{name}: may_import should read {' '.join(sorted(imported[name]))!r} if that is intended"
        for name, entry in PACKAGES.items()
        if imported[name] != set(entry.may_import.split())
    ]
    assert not differ, report(differ)
    order = list(PACKAGES)
    for name, targets in imported.items():
        assert all(order.index(target) < order.index(name) for target in targets), (
            f"{name} imports from below"
        )


def test_design_page_has_the_same_table():
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|.*\| (.*) \|$", page, re.M)
    table = {name: imports.replace(",", "").replace("–", "") for name, imports in rows}
    assert table == {name: entry.may_import for name, entry in PACKAGES.items()}
    assert list(table) == list(PACKAGES)


def test_no_cycles_between_files():
    TopologicalSorter(
        PACKAGE.file_graph(type_only=False)
    ).prepare()  # raises CycleError with the cycle
    assert not PACKAGE.cycles, "type-only imports included"


def test_no_file_imports_the_public_table():
    public = {f"fpipe.{name}" for name in fpipe.__all__ if name not in MODULES}
    wrong = [
        f"{name}:{found.line} imports {found.target}; import the module that defines the name"
        for name, module in MODULES.items()
        for found in module.imports
        if found.target in {"fpipe", *public} and not name.startswith(PUBLIC_ONLY)
    ]
    assert not wrong, report(wrong)


def test_products_import_public_names():
    """Names of the public table, and what packages export: never a file within a package."""
    wrong = [
        f"{name} imports {found.target}: import what the package exports"
        for name, module in MODULES.items()
        if name.startswith(PUBLIC_ONLY)
        for found in PACKAGE.inner_imports(module)
        if found.target.partition(".")[0] != module.entry and "." in found.target
    ]
    assert not wrong, report(wrong)


def test_schedules_need_no_torch():
    wrong = [
        f"{name}:{found.line} imports {found.target}"
        for name, module in MODULES.items()
        if module.entry in TORCH_FREE
        for found in module.imports
        if found.target.partition(".")[0] in ("torch", "optree", "numpy")
        and (name, found.target) != ("actions.columns", "numpy")  # for large schedules alone
    ]
    assert not wrong, report(wrong)


# ---- files ----
def test_sizes():
    """Tokens bound a file, since lines can be packed; lines bound a function, which is seen
    whole.
    """
    long = [
        f"{name} has {module.tokens} tokens"
        for name, module in MODULES.items()
        if module.tokens >= 4000
    ]
    for name, module in MODULES.items():
        lengths = {node: length(node) for node in module.functions}
        long += [f"{name}:{node.lineno} {node.name}: {n}" for node, n in lengths.items() if n >= 80]
    assert not long, report(long)


def test_no_packed_code():
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert "line-length = 100" in text
    assert not [name for name, module in MODULES.items() if "# fmt: " in module.text]


def test_heart_does_not_grow():
    """``python tests/helpers/heart.py`` prints the files. Lower these figures when the heart
    shrinks.
    """
    helper = Path(__file__).parents[1] / "helpers" / "heart.py"
    done = subprocess.run(
        [sys.executable, helper, "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    heart = json.loads(done.stdout)
    if torch.version.cuda is not None and not torch.cuda.is_available():
        for name in ("actions/product.py", "passes/first_mode.py"):  # a mode that torch then needs
            if name in heart["files"]:
                heart["count"] -= 1
                heart["tokens"] -= heart["files"].pop(name)["tokens"]
    assert heart["count"] <= 32
    assert heart["tokens"] <= 47_000
    assert heart["run"] / heart["lines"] >= 0.5
    page = (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## The heart")[2].partition("\n## ")[0]
    listed = re.findall(r"`([a-z_/]+\.py)`", section.partition("1. The values")[2])
    assert sorted(listed) == sorted(heart["files"]), "docs/design.md lists the heart"
    features = [name for name in heart["files"] if name.startswith(("passes/", "products/"))]
    assert not features, "a feature runs although it is off"


def test_whole_does_not_grow():
    tokens, lines = PACKAGE.total("tokens"), PACKAGE.total("code_lines")
    assert tokens <= 321_728
    assert tokens / lines <= 9.07
    assert PACKAGE.total("anys") <= 488


#: The heart and the engine: what DESIGN calls rings 0 and 1. Shared memory and the launchers of
#: clusters are extensions.
CORE = {
    "errors",
    "tree",
    "stage",
    "schedule",
    "actions",
    "generators",
    "programs",
    "lowering",
    "engine",
    "collectives",
    "devices",
}


def test_the_core_does_not_grow():
    core = [
        module.tokens
        for name, module in MODULES.items()
        if module.entry in CORE
        and not name.startswith(("collectives.shared_memory", "collectives.launchers"))
    ]
    assert sum(core) <= 110_000


def test_no_regression():
    """Figures of the whole package that were reached once; ``python tests/helpers/structure.py``
    prints them.
    """
    assert PACKAGE.levels <= 9
    assert PACKAGE.total("group_getattrs") == 0
    # three have interfaces of torch.distributed.pipelining and verl, four are plans while they are
    # lowered, one has the choices of a schedule, one the members of elastic copies, nine what is
    # under way or failed in a connection, one posts running sums while a
    # plan is lowered, five what has run in the ready order, one the batches of an epoch under way
    assert len(PACKAGE.mutated_classes) <= 31
    assert len(PACKAGE.long_functions) <= 8
    assert PACKAGE.total("ignores") <= 29


def test_licence_of_every_file():
    wrong = [name for name, module in PACKAGE.modules.items() if not module.text.startswith(SPDX)]
    assert not wrong, f"the first line of {wrong} must be {SPDX!r}"


#: Methods that overrides document once, in ``lowering``: of Opcode and Feature.
INHERITED = {
    node.name
    for module in ("lowering.instruction", "lowering.plan")
    for owner in MODULES[module].tree.body
    if isinstance(owner, ast.ClassDef) and owner.name in ("Opcode", "Feature")
    for node in owner.body
    if isinstance(node, ast.FunctionDef)
}


def undocumented(name: str, module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield f"{name}: the module"
    kinds = (*Function.__args__, ast.ClassDef)
    for node in module.tree.body if not name.rpartition(".")[2].startswith("_") else ():
        if not isinstance(node, kinds) or node.name.startswith("_") or _overloaded(node):
            continue
        if not ast.get_docstring(node):
            yield f"{name}:{node.lineno} {node.name}"
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if (
                isinstance(member, kinds)
                and not (node.bases and member.name in INHERITED)
                and not member.name.startswith("_")
                and not ast.get_docstring(member)
            ):
                yield f"{name}:{member.lineno} {node.name}.{member.name}"


def _overloaded(node: ast.AST) -> bool:
    return any(
        ast.unparse(mark).endswith("overload") for mark in getattr(node, "decorator_list", ())
    )


def test_docstrings():
    missing = [place for name, module in MODULES.items() for place in undocumented(name, module)]
    assert not missing, report(missing)


# ---- private names ----
def declared(module: Module) -> set[str]:
    """Underscored names that the file defines: functions, classes, variables, attributes of
    ``self``.
    """
    names = set()
    for node in module.nodes:
        if isinstance(node, (*Function.__args__, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_self(node.value)
        ):
            names.add(node.attr)
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(module: Module) -> Iterator[tuple[str, int]]:
    """Private names of others, in every spelling: imports, attributes, and strings as for
    ``getattr``.
    """
    for found in module.imports:
        if found.target.partition(".")[0] != "fpipe":
            yield from (
                (part, found.line) for part in found.target.split(".") if part.startswith("_")
            )
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and _is_private_text(node.value):
            yield str(node.value), node.lineno


def _is_private_text(value: object) -> bool:
    return (
        isinstance(value, str)
        and value not in FILE_NAMES
        and re.fullmatch(r"_\w+", value) is not None
    )


def used_private_names(module: Module) -> dict[str, int]:
    ours = declared(module)
    names = ((name, line) for name, line in private_names(module) if name.startswith("_"))
    return {
        name: line for name, line in names if not DOCUMENTED.fullmatch(name) and name not in ours
    }


def test_private_names():
    used = {name: used_private_names(module) for name, module in MODULES.items()}
    wrong = [
        f"{name}:{line} uses {private}: move it to a small file listed in PRIVATE_TORCH"
        for name, lines in used.items()
        for private, line in lines.items()
        if private not in PRIVATE_TORCH.get(name, ())
    ]
    assert not wrong, report(wrong)
    unused = [
        f"{name} no longer uses {names - used.get(name, {}).keys()}"
        for name, names in PRIVATE_TORCH.items()
        if names - used.get(name, {}).keys()
    ]
    assert not unused, report(unused)
    long = [name for name in PRIVATE_TORCH if MODULES[name].tokens > PRIVATE_FILE_TOKENS]
    assert not long, report(long)


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import Node",
        "import torch._dynamo",
        "torch._C.f()",
        "tensor._version",
        "node._sequence_nr()",
        "func._schema",
        "op._opname",
        "t.untyped_storage()._cdata",
        'getattr(torch, "_x")',
        'hasattr(node, "_raw_saved_")',
        'getattr(node, f"_raw_saved_{name}")',
        "from torch.utils._pytree import tree_map",
        "self.group.pg._backend",
    ],
)
def test_private_names_are_found_in_every_spelling(line: str):
    assert used_private_names(Module("some", Path("some.py"), line + "\n"))


# ---- public names ----
def test_type_checkers_see_the_table_of_public_names():
    tree = PACKAGE.modules[""].tree
    block = next(node for node in tree.body if isinstance(node, ast.If))
    aliases = [
        alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    hidden = [alias.name for alias in aliases if alias.name not in ("*", alias.asname)]
    assert not hidden, (
        "type checkers take an import for private unless its name is repeated: import x as x"
    )
    imported: dict[str, object] = {"__name__": "fpipe", "__package__": "fpipe"}
    exec(compile(ast.Module(block.body, []), "fpipe/__init__.py", "exec"), imported)
    public = {name: value for name, value in imported.items() if not name.startswith("__")}
    for name in fpipe.__all__:  # functions of the table check the names of their arguments
        assert unwrap(public.pop(name)) == unwrap(getattr(fpipe, name)), name
    assert not public


@pytest.mark.parametrize("name", fpipe.__all__)
def test_public_names_resolve(name: str):
    assert getattr(fpipe, name) is not None
    assert name in dir(fpipe)


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="no attribute 'pipline'"):
        fpipe.pipline  # noqa: B018


def test_no_function_and_module_share_a_name():
    """``import fpipe.x as m`` would give the function, and the lazy table the module."""
    files = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    }
    assert not files & set(fpipe._NAMES)
    assert {module.split(".")[0] for module in fpipe._MODULES.values()} <= files


def test_public_names_of_schedules_load_without_torch():
    """Importing torch takes seconds, and ``fpipe draw`` without it milliseconds."""
    lazy = sorted(
        name for name, module in fpipe._NAMES.items() if module.split(".")[0] in TORCH_FREE
    )
    code = (
        f"import sys, fpipe; [getattr(fpipe, n) for n in {lazy}]; print('torch' in "
        "sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]
