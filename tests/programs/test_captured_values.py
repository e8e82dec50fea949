"""What a traced stage reads of its surroundings beside its arguments."""

import copy
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest
import torch

import fpipe
from fpipe.errors import TraceError

X = torch.ones(4, 3)
P = torch.full((3,), 0.5)
T = torch.tensor([1.0, 2.0, 0.99])


def run(fn, x=X, p=P, **options):
    pipe = fpipe.pipeline([fn], "GPipe", microbatches=1, group=fpipe.local(1), **options)
    return pipe([p], x)


READERS = {
    "numpy": lambda p, x: x * p * float(T.numpy().sum()),
    "force": lambda p, x: x * p * float(T.numpy(force=True).sum()),
    "asarray": lambda p, x: x * p * float(np.asarray(T).sum()),
    "as_tensor": lambda p, x: x * p * torch.as_tensor(T.numpy()),
    "cpu": lambda p, x: x * p * float(T.cpu().numpy().sum()),
    "to": lambda p, x: x * p * float(T.to(torch.float32).numpy().sum()),
    "slice": lambda p, x: x * p * float(T[1:].numpy().sum()),
    "deepcopy": lambda p, x: x * p * copy.deepcopy(T).sum(),
    "storage": lambda p, x: x * p * sum(T.untyped_storage().tolist()),
    "argument": lambda p, x: x * float(p.numpy().sum()),
}


@pytest.mark.parametrize("name", READERS)
def test_memory_of_a_captured_tensor_is_not_read_while_a_stage_is_traced(name):
    """Freed memory was read, with other numbers in each run."""
    with pytest.raises(TraceError, match=r"reads the memory of a tensor at .*test_captured_values"):
        run(READERS[name])
    if name != "deepcopy":  # its copy of a storage is a write on the way
        assert torch.equal(run(READERS[name], engine="eager"), READERS[name](P, X))


# ---- functions that are equal ----
@dataclass(frozen=True)
class Scale:
    by: float = field(compare=False)

    def __call__(self, p, x):
        return x * p * self.by


@dataclass(frozen=True)
class Inverse:
    by: float

    def __call__(self, p, x):
        return x * p / self.by


@dataclass(frozen=True)
class Filled:
    by: object

    def __call__(self, p, x):
        return torch.full(x.shape, self.by)


class Slotted:
    """Cannot be referenced weakly."""

    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Slotted)

    def __hash__(self):
        return 1

    def __call__(self, p, x):
        return x * p * self.by


EQUAL = [
    (Scale(2.0), Scale(3.0)),
    (Inverse(0.0), Inverse(-0.0)),
    (Filled(1), Filled(1.0)),
    (Slotted(2.0), Slotted(3.0)),
]


@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("pair", EQUAL, ids=lambda pair: type(pair[0]).__name__)
def test_functions_that_are_equal_have_traces_of_their_own(pair, engine):
    assert pair[0] == pair[1]
    for fn in pair:
        y = run(fn, engine=engine)
        assert torch.equal(y, fn(P, X))
        assert y.dtype == fn(P, X).dtype


def test_losses_that_are_equal_have_traces_of_their_own():
    @dataclass(frozen=True)
    class Loss:
        by: float = field(compare=False)

        def __call__(self, y):
            return y.sum() * self.by

    losses = [Loss(2.0), Loss(3.0)]
    for loss in losses:
        assert run(Inverse(1.0), loss=loss) == loss(P * X)
        assert run(Inverse(1.0), loss=fpipe.Stage(loss, engine="eager")) == loss(P * X)


# ---- helpers that keep what they computed ----
@lru_cache
def rotary(n):
    angles = torch.outer(torch.arange(4.0), 1 / 100 ** (torch.arange(n) / n))
    return angles.cos(), angles.sin()


@lru_cache(maxsize=1)
def mask(n):
    table = torch.zeros(n, n)
    table[0, 1] = 5.0
    return table.triu_(1)


def with_rotary(p, x):
    cos, sin = rotary(3)
    return x * p * cos + x * sin @ mask(3)


KEPT = {}


def with_dictionary(p, x):
    if "table" not in KEPT:
        KEPT["table"] = torch.tensor([1.0, 2.0, 3.0])[None] * 2
    return x * p + KEPT["table"]


class Attribute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(P)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(3.0)
        return x * self.weight + self.table


@pytest.fixture(autouse=True)
def empty_caches():
    rotary.cache_clear()
    mask.cache_clear()
    KEPT.clear()
    yield
    for value in (*rotary(3), mask(3), *KEPT.values()):
        assert type(value) is torch.Tensor
        value.tolist()


@pytest.mark.parametrize("engine", ["trace", "eager"])
@pytest.mark.parametrize("fn", [with_rotary, with_dictionary])
def test_a_helper_with_a_cache_works_in_a_stage(fn, engine):
    """The pipeline returned a FakeTensor, and the cache had one outside of fpipe, too."""
    y = run(fn, engine=engine)
    rotary.cache_clear()
    mask.cache_clear()
    KEPT.clear()
    assert torch.equal(y, fn(P, X))


def test_a_helper_with_a_cache_works_in_a_loss_and_in_gradients():
    def loss(y):
        return (y * mask(3).sum(0) + rotary(3)[0]).square().sum()

    pipe = fpipe.pipeline([with_rotary], "GPipe", loss=loss, microbatches=2, group=fpipe.local(1))
    value, (grad,) = fpipe.value_and_grad(pipe)([P], torch.cat([X, X]))
    p = P.clone().requires_grad_()
    expected = loss(with_rotary(p, X))
    assert value == expected
    assert torch.equal(grad, *torch.autograd.grad(expected, p))


def test_a_module_that_keeps_a_table_works():
    model = torch.nn.Sequential(Attribute(), torch.nn.Identity())
    stages, params = fpipe.from_module(model, cuts=["1"])
    pipe = fpipe.pipeline(stages, "GPipe", microbatches=1, group=fpipe.local(1))
    y = pipe(params, X)
    assert torch.equal(y, model(X))


def test_a_cache_is_usable_after_a_stage_that_cannot_be_traced():
    def looking(p, x):
        return with_rotary(p, x) * float(x.sum())

    with pytest.raises(TraceError, match="depends on data"):
        run(looking)
    assert torch.equal(rotary(3)[0], rotary.__wrapped__(3)[0])


def test_a_cache_in_a_trace_for_all_lengths():
    @lru_cache
    def positions(n):
        return torch.arange(float(n))[:, None]

    def fn(p, x):
        return x * p + positions(8)[: x.shape[0]]

    pipe = fpipe.pipeline([fn], "GPipe", microbatches=1, group=fpipe.local(1))
    for n in (4, 5, 6, 7):
        x = torch.ones(n, 3)
        assert torch.equal(pipe([P], x), fn(P, x))


def test_a_cached_table_keeps_the_precision_in_which_it_was_computed():
    @lru_cache
    def angles(n):
        with torch.autocast("cpu", enabled=False):
            return torch.arange(1.0, n + 1)[:, None] @ torch.full((1, 3), 1 / 3)

    def fn(p, x):
        return x * p + angles(2)

    x = torch.ones(2, 3)
    pipe = fpipe.pipeline([fn], "GPipe", microbatches=1, group=fpipe.local(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pipe([P], x), x * P + angles.__wrapped__(2))
    assert torch.equal(angles(2), angles.__wrapped__(2))


def test_a_tensor_kept_from_an_input_is_refused_with_the_line():
    kept = []

    def fn(p, x):
        if not kept:
            kept.append(x.sum(0))
        return x * p + kept[0]

    with pytest.raises(TraceError, match=r"uses a tensor without data at .*kept\[0\]"):
        run(fn)
