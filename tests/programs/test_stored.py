"""Traces on disk: equal after reading, found by what a function is, and no way for code to come
in.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fpipe
from fpipe.programs import trace_cache
from fpipe.programs.signature import Signature
from fpipe.programs.spent import measured
from fpipe.programs.stored import folder, records, text
from fpipe.programs.stored.identity import identity
from fpipe.programs.stored.text import ForgedError, UnstorableError, from_text, name_of, to_text
from fpipe.stage import as_stage
from fpipe.tree import AbstractTree
from sized_stages import FUNCTIONS, inputs, leaves, masked, parameters


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is in use, for the length of a test."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def forget() -> None:
    """As a new process begins."""
    trace_cache._WEAK.clear()
    trace_cache._STRONG.clear()


def traces(act: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and how many traces it took."""
    with measured() as parts:
        result = act()
    return result, sum(part.traces for part in parts)


def step(programs: fpipe.Programs, params: Any, x: Any, side: Any) -> list[torch.Tensor]:
    """All results of all programs."""
    y, saved = programs.forward(params, x, **side)
    torch.manual_seed(1)
    dy = torch.utils._pytree.tree_map(torch.randn_like, y)
    dx, kept = programs.backward_input(saved, dy)
    return leaves(y, programs.backward(saved, dy), dx, programs.backward_weight(kept))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_a_second_start_traces_nothing_and_computes_the_same_bits(
    fn: Callable[..., Any], cached: Path
):
    torch.manual_seed(0)
    params = parameters()
    stage = lambda p, x, **side: fn(p, x, **side)
    if fn is masked:
        stage = lambda p, x, *, keep: fn(p, x, keep=keep)
    batches = [inputs(fn, rows, length) for rows, length in ((2, 6), (3, 8), (4, 12))]
    found: list[list[list[torch.Tensor]]] = []
    counts = []
    for _ in range(2):
        forget()
        programs, count = traces(
            lambda: [fpipe.trace(stage, params, x, **side) for x, side in batches]
        )
        counts.append(count)
        found.append(
            [step(p, params, x, side) for p, (x, side) in zip(programs, batches, strict=True)]
        )
    assert counts == [2, 0], "one plain trace and one with symbolic sizes, then none"
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_programs_that_were_read_print_and_account_as_those_written(fn: Callable[..., Any]):
    torch.manual_seed(0)
    params = parameters()
    x, side = inputs(fn, 3, 8)
    written = fpipe.trace(fn, params, x, **side)
    data = json.loads(json.dumps(records.programs_as_data(written, [])))
    read = records.programs_from_data(data, [], "stage", "stage")
    for letter in "fbiw":
        one, other = getattr(written, letter), getattr(read, letter)
        assert one.code == other.code
        assert [o.reads for o in one.traced] == [o.reads for o in other.traced]
        assert [o.value for o in one.traced] == [o.value for o in other.traced]
    same = (
        "counts",
        "outputs",
        "ys",
        "aux",
        "dps",
        "dxs",
        "saved",
        "kept",
        "grad_avals",
        "memory",
        "fresh",
    )
    assert all(getattr(written, name) == getattr(read, name) for name in same)


def test_a_pipeline_with_a_loss_and_dropout_traces_nothing_in_a_second_start(cached: Path):
    def layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ p, 0.5)

    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (y - t).square().mean()

    results, counts = [], []
    for _ in range(2):
        forget()
        pipe = fpipe.pipeline(
            [layer] * 4, "ZBV", loss=loss, microbatches=4, group=fpipe.local(2), seed=3
        )
        arguments = [torch.eye(4)] * 4, torch.ones(8, 4), torch.zeros(8, 4)
        with measured() as parts:
            result = fpipe.value_and_grad(pipe)(*arguments)
        count = sum(part.traces for part in parts)
        results.append(leaves(result))
        counts.append(count)
    assert counts[0] >= 2
    assert counts[1] == 0
    assert all(map(torch.equal, *results))


# ---- what identifies a function ----
SCALE = [2.0]


def helper(x: Any) -> Any:
    return x * SCALE[0]


def uses_helper(p: Any, x: Any) -> Any:
    return helper(x @ p)


def compiled(source: str) -> Callable[..., Any]:
    """A function of a program that is in no file."""
    module = ModuleType("written_here")
    exec(textwrap.dedent(source), module.__dict__)
    return module.fn  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def fn(p, x): return x + 1", "def fn(p, x): return x + 2"),
        ("def fn(p, x): return x.sin()", "def fn(p, x): return x.cos()"),
        ("def fn(p, x, n=1): return x * n", "def fn(p, x, n=2): return x * n"),
        ("k = 1\ndef fn(p, x): return x * k", "k = 2\ndef fn(p, x): return x * k"),
        (
            "def g(x): return x\ndef fn(p, x): return g(x)",
            "def g(x): return -x\ndef fn(p, x): return g(x)",
        ),
        ("fn = (lambda k: lambda p, x: x * k)(1)", "fn = (lambda k: lambda p, x: x * k)(2)"),
        ("fn = lambda p, x: (lambda y: y + 1)(x)", "fn = lambda p, x: (lambda y: y + 2)(x)"),
        (
            "class C:\n  def __init__(s): s.k = 1\n  def __call__(s, p, x): return x * s.k\nfn = "
            "C()",
            "class C:\n  def __init__(s): s.k = 2\n  def __call__(s, p, x): return x * s.k\nfn = "
            "C()",
        ),
        (
            "class B:\n  def f(s, x): return x\nclass C(B):\n  def __call__(s, p, x): return "
            "s.f(x)\nfn = C()",
            "class B:\n  def f(s, x): return -x\nclass C(B):\n  def __call__(s, p, x): return "
            "s.f(x)\nfn = C()",
        ),
        (
            "import torch\nt = torch.ones(2)\ndef fn(p, x): return x * t[0]",
            "import torch\nt = torch.zeros(2)\ndef fn(p, x): return x * t[0]",
        ),
        (
            "from functools import partial\nfn = partial(max, 1)",
            "from functools import partial\nfn = partial(max, 2)",
        ),
        (
            "import math\ndef fn(p, x): return math.sin(1)",
            "import math\ndef fn(p, x): return math.cos(1)",
        ),
    ],
)
def test_functions_that_compute_something_else_have_other_identities(one: str, other: str):
    assert identity(compiled(one)) != identity(compiled(other))
    assert identity(compiled(one))[0] == identity(compiled(one))[0], "and equal ones the same"


def test_a_global_of_a_function_that_is_called_counts(monkeypatch: pytest.MonkeyPatch):
    before = identity(uses_helper)[0]
    assert identity(uses_helper)[0] == before
    monkeypatch.setitem(globals(), "SCALE", [3.0])
    assert identity(uses_helper)[0] != before


def test_a_module_counts_by_its_code_mode_and_shapes_and_not_by_its_weights():
    def model(width: int = 4, training: bool = True) -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(40, 40), torch.nn.Dropout(0.1), torch.nn.Linear(40, width)
        ).train(training)

    assert identity(model())[0] == identity(model())[0]
    assert identity(model())[0] != identity(model(5))[0]
    assert identity(model())[0] != identity(model(training=False))[0]


def test_what_has_no_description_is_traced_in_every_run(cached: Path, tmp_path: Path):
    with open(tmp_path / "file", "w") as file:

        def stage(p: Any, x: Any) -> Any:
            return x if file.closed else x @ p

        with pytest.raises(UnstorableError, match="TextIOWrapper"):
            identity(stage)
        for _ in range(2):
            forget()
            assert traces(lambda: fpipe.trace(stage, torch.eye(2), torch.ones(1, 2)))[1] == 1
    assert not cached.exists()


# ---- captured tensors ----
def test_a_captured_tensor_is_that_of_the_function_that_lives(cached: Path):
    def closed_over(big: torch.Tensor) -> Callable[..., Any]:
        return lambda p, x: x @ p + big

    one, other = torch.ones(3000, 2), torch.full((3000, 2), 5.0)
    x, p = torch.ones(3000, 2), torch.eye(2)
    first = fpipe.trace(closed_over(one), p, x)
    forget()
    second, count = traces(lambda: fpipe.trace(closed_over(other), p, x))
    assert count == 0
    assert torch.equal(second.forward(p, x)[0] - first.forward(p, x)[0], torch.full((3000, 2), 4.0))


def test_a_tensor_that_the_function_creates_is_stored_with_its_numbers(cached: Path):
    def stage(p: Any, x: Any) -> Any:
        return x @ p + torch.tensor([1.5, -2.5])

    results = []
    for _ in range(2):
        forget()
        programs, count = traces(lambda: fpipe.trace(stage, torch.eye(2), torch.ones(1, 2)))
        results.append((programs.forward(torch.eye(2), torch.ones(1, 2))[0].tolist(), count))
    assert results == [([[2.5, -1.5]], 1), ([[2.5, -1.5]], 0)]


# ---- damaged and forged files ----
def stage_of_two(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


def run() -> tuple[list[float], int]:
    forget()
    programs, count = traces(lambda: fpipe.trace(stage_of_two, torch.eye(2), torch.ones(1, 2)))
    return programs.forward(torch.eye(2), torch.ones(1, 2))[0].tolist(), count


def test_a_flipped_byte_is_found_and_the_file_replaced(cached: Path):
    expected, _ = run()
    (path,) = cached.rglob("*.json")
    raw = bytearray(path.read_bytes())
    for place in (3, 70, len(raw) // 2, len(raw) - 2):
        path.write_bytes(bytes(raw[:place]) + bytes([raw[place] ^ 4]) + bytes(raw[place + 1 :]))
        with pytest.warns(UserWarning, match=r"the trace in .*\.json is damaged .*digest"):
            assert run() == (expected, 1)
        assert run() == (expected, 0)
    path.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert run() == (expected, 1)


def forge(path: Path, change: Callable[[Any], None]) -> None:
    """Change a file and its digest."""
    import hashlib

    data = json.loads(path.read_bytes().partition(b"\n")[2])
    change(data)
    body = json.dumps(data).encode()
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


CODE = "x=__import__('os').system('touch HACKED')"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["operations"][0].__setitem__(0, CODE),
        lambda data: data["operations"][0].__setitem__(1, ["op", "aten", "from_file", "default"]),
        lambda data: data["operations"][0].__setitem__(1, ["op", "__class__", "mro", "default"]),
        lambda data: data["operations"][0].__setitem__(1, ["fn", "system"]),
        lambda data: data["operations"][0].__setitem__(2, ["t", ["r", CODE]]),
        lambda data: data["operations"][0].__setitem__(3, ["d", [CODE, 1]]),
        lambda data: data["programs"][0].__setitem__(1, [CODE]),
        lambda data: data["programs"][0].__setitem__(2, [CODE]),
        lambda data: data["captured"].__setitem__(CODE, 0),
        lambda data: data["captured"].__setitem__(
            "c", ["x", ["T", "float32"], ["t", 1 << 40], ["D", "cpu"], ""]
        ),
        lambda data: data["outputs"].__setitem__(0, ["S", ["named", "os", "system"]]),
        lambda data: data["outputs"].__setitem__(0, ["T", "load"]),
        lambda data: data["avals"].clear(),
        lambda data: data.clear(),
    ],
)
def test_a_forged_file_runs_nothing(
    cached: Path, change: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    expected, _ = run()
    (path,) = cached.rglob("*.json")
    forge(path, change)
    with pytest.warns(UserWarning, match="is damaged"):
        assert run() == (expected, 1)
    assert not (tmp_path / "HACKED").exists()


@pytest.mark.parametrize(
    "formula",
    ["__import__('os')", "s0.real", "[s0]", "math.__dict__", "(lambda: 1)()", "open('x')"],
)
def test_a_formula_is_arithmetic_alone(formula: str):
    with pytest.raises(ForgedError):
        records._check_formula(formula, ("s0",))
    records._check_formula(
        "max(2*s0 + 1, math.floor(s0 / 3)) if s0 >= 2 and not s0 % 4 == 1 else -s0", ("s0",)
    )


@pytest.mark.parametrize("name", ["a b", "a;b", "", "1a", "lambda", None, 3, "a\nb", "ａ"])
def test_names_in_sources_are_names(name: Any):
    with pytest.raises(ForgedError):
        name_of(name)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.0,
        float("nan"),
        float("-inf"),
        1 + 2j,
        "text",
        b"\0\xff",
        [1, (2, [])],
        {"a": 1, 2: "b"},
        slice(1, None, -2),
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        torch.device("cuda:1"),
        torch.ops.aten.add.Tensor,
        torch.ops.aten.native_layer_norm_backward.default,
        torch.Size([2, 3]),
        AbstractTree.of({"x": [torch.ones(2, 3), 4], "n": (None, 2.5)}),
        AbstractTree.of(torch.ones(3).to(torch.int8)),
        Signature(*map(AbstractTree.of, ([torch.ones(2)], torch.ones(2, 3).T, {}, None))).x,
    ],
)
def test_values_come_back(value: Any):
    back = from_text(json.loads(json.dumps(to_text(value))))
    assert repr(back) == repr(tuple(value) if isinstance(value, torch.Size) else value)
    assert type(back) is type(value) or isinstance(value, torch.Size)


def test_a_folder_that_cannot_be_written_is_no_fault_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="a trace cannot be kept in .*fpipe.cache"):
        assert run()[1] == 1


def test_cache_sets_the_variable_that_other_processes_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(folder.VARIABLE, "before")
    fpipe.cache(tmp_path)
    assert run()[1] == 1
    assert run()[1] == 0
    fpipe.cache(None)
    assert run()[1] == 1
    assert as_stage(stage_of_two).fn is stage_of_two
    assert text.MOST < folder.MOST
