"""Every differentiable operator of torch as a stage, with both engines:
``python -m tests.fuzz.operators``.

The samples are those of torch's operator tests. The oracle is autograd on the function itself.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
import optree
import torch
from rich.progress import track
from torch import Tensor

import fpipe

_DATA = "what it computes, or its shape, depends on data: a trace refuses it"
_WRITES = "writes running statistics into its arguments, and stages are pure: refused"
_SPARSE = "takes compressed sparse tensors, which have no strides: refused"
#: operator -> why it is refused or has other last bits, under one engine or both
EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "combinations",
            "corrcoef",
            "cov",
            "index_fill",
            "index_put",
            "linalg_lstsq",
            "linalg_lstsq_grad_oriented",
            "narrow",
            "nn_functional_ctc_loss",
            "nn_functional_gaussian_nll_loss",
        ),
        _DATA,
    ),
    **dict.fromkeys(
        ("masked_select", "tensor_split"),
        "the shape of its result depends on data: refused by both engines",
    ),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_batch_norm_with_update",
            "nn_functional_batch_norm",
            "nn_functional_instance_norm",
        ),
        _WRITES,
    ),
    **dict.fromkeys(("sparse_sampled_addmm", "sparse_mm_reduce"), _SPARSE),
    "to_sparse": "returns a sparse tensor, which cannot be sent: refused",
    **dict.fromkeys(
        ("as_strided", "as_strided_partial_views"),
        "names a place in the memory of its argument: a trace refuses it",
    ),
    "linalg_eig": "plain autograd refuses the loss, which depends on the phase of eigenvectors",
    "unfold": "its result overlaps itself in memory and arrives contiguous: other last bits of a "
    "sum over it",
    **dict.fromkeys(
        ("movedim", "linalg_tensorinv"),
        "under trace a sum over the permuted result runs in another order: other last bits",
    ),
    "masked_fill": "under trace the gradient of the value is summed in another order: other last "
    "bits",
    "prod": "under trace the gradient is computed without a look at the data for zeros: other "
    "last bits",
}
#: No exception covers these: a number that is not close, and an error that is not one of fpipe.
_WRONG = ("different", "error")
SAMPLES = 3
#: Traces, traces with symbolic sizes (at several sizes of the first axis), and autograd.
ENGINES = ("trace", "symbolic", "eager")
RANKING = {"equal": 0, "fell back": 1, "close": 2, "refused": 3, "different": 4, "error": 5}


class Found(NamedTuple):
    """The result of one operator under one engine."""

    name: str
    engine: str
    kind: str  # "equal", "close", "refused", "different" or "error"
    text: str = ""


def flat(value: Any) -> list[Any]:
    """The leaves of a pytree."""
    return optree.tree_leaves(value, namespace="fpipe")


def unflatten(spec: Any, leaves: list[Any]) -> Any:
    """The pytree of leaves."""
    return optree.tree_unflatten(spec, leaves)


def is_float(leaf: object) -> bool:
    """Whether a leaf can have a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _stage(op: Callable[..., Any], spec: Any, constants: list[Any]) -> Callable[[Any, Any], Any]:
    def fn(p: list[Tensor], x: Any) -> Any:
        rest = iter(p)
        args, kwargs = unflatten(spec, [next(rest) if c is _TENSOR else c for c in constants])
        out = op(x, *args, **kwargs)
        kept = tuple(leaf for leaf in flat(out) if is_float(leaf))
        return kept or (torch.zeros(()),)

    return fn


_TENSOR = object()


def _loss(y: Any, _: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for leaf in flat(y):
        real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        wave = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=torch.float64)[
            : real.numel()
        ].view(real.shape)
        total = total + (real.double() * wave).sum()
    return total


def _expected(fn: Callable[..., Any], p: list[Tensor], x: Any) -> tuple[Tensor, list[Tensor]]:
    """The value, and the gradients of the tensors that require one."""
    fresh = lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
    live, x = [fresh(t) for t in p], optree.tree_map(fresh, x, namespace="fpipe")
    value = _loss(fn(live, x), None)
    wanted = [t for t in (*live, *flat(x)) if isinstance(t, Tensor) and t.requires_grad]
    found = (
        torch.autograd.grad(value, wanted, allow_unused=True)
        if value.requires_grad
        else [None] * len(wanted)
    )
    return value.detach(), [
        torch.zeros_like(a) if g is None else g for a, g in zip(wanted, found, strict=True)
    ]


def _compare(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"different {one.dtype}{list(one.shape)} for {other.dtype}{list(other.shape)}"
    if torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    ):
        return "equal"
    return (
        "close" if torch.allclose(one, other, rtol=1e-7, atol=1e-9, equal_nan=True) else "different"
    )


def _one(op: Any, sample: Any, engine: str) -> tuple[str, str]:
    """The kind of a sample and a text. OpInfo marks the tensors that the operator is differentiable
    in.
    """
    given: Any = (sample.args, sample.kwargs)
    leaves, spec = optree.tree_flatten(given, namespace="fpipe")
    constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    p = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    fn = _stage(op.op, spec, constants)
    stage = fpipe.Stage(fn, dynamic=True) if engine == "symbolic" else fn
    pipe = fpipe.pipeline(
        [stage],
        loss=_loss,
        microbatches=1,
        group=fpipe.local(1),
        engine="eager" if engine == "eager" else "trace",
        frozen=[f"0.{i}" for i, t in enumerate(p) if is_float(t) and not t.requires_grad],
    )
    found = _compared(pipe, fn, p, sample.input)
    if engine != "symbolic" or found[0] == "refused":
        return found
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for x in _other_sizes(fn, p, sample.input):
            found = max(found, _compared(pipe, fn, p, x), key=lambda kind: RANKING[kind[0]])
    fell = [
        str(each.message) for each in warned if "is traced for every new size" in str(each.message)
    ]
    return ("fell back", fell[0]) if fell and found[0] == "equal" else found


def _other_sizes(fn: Callable[..., Any], p: list[Tensor], x: Any) -> Iterator[Any]:
    """Inputs with other sizes of the first axis for which the operator is defined."""
    if not isinstance(x, Tensor) or not x.dim() or x.shape[0] < 3:
        return
    for other in (x[:-1], torch.cat([x, x[1:]])):
        other = other.detach().clone().requires_grad_(x.requires_grad)
        try:
            torch.manual_seed(0)
            _expected(fn, p, other)
        except Exception:
            continue
        yield other


def _compared(
    pipe: fpipe.Pipeline, fn: Callable[..., Any], p: list[Tensor], x: Any
) -> tuple[str, str]:
    """The kind of one call, and a text."""
    torch.manual_seed(0)
    try:
        value, grads = _expected(fn, p, x)
    except RuntimeError as error:
        return "refused", f"plain autograd raises {error}"
    floating = [t for t in flat(x) if is_float(t)]
    argnums = (0, 1) if any(t.requires_grad for t in floating) else (0,)
    given = [p], fpipe.Microbatches([x]), fpipe.Microbatches([torch.zeros(1)])
    torch.manual_seed(0)
    try:
        got, found = fpipe.value_and_grad(pipe, argnums)(*given)
    except fpipe.FpipeError as error:
        return "refused", f"{type(error).__name__}: {error}"
    dxs = (
        [g for g, t in zip(flat(next(iter(found[1]))), floating, strict=True) if t.requires_grad]
        if found[1:]
        else []
    )
    got_grads = [*(g for g in flat(found[0]) if g is not None), *dxs]
    if len(got_grads) != len(grads):
        return "different", f"{len(got_grads)} gradients where {len(grads)} are expected"
    kinds = [_compare(got, value), *(_compare(a, b) for a, b in zip(got_grads, grads, strict=True))]
    worst = next(
        (k for k in kinds if k.startswith("different")), "close" if "close" in kinds else "equal"
    )
    return worst.split()[0], worst


def operators() -> Any:
    """OpInfo's operators, without the seeds that it sets inside of some: a trace records no
    seeds.
    """
    from torch.testing._internal import common_methods_invocations as invocations

    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]
    return invocations.op_db


def sweep(index: int) -> list[Found]:
    """All engines on the samples of one operator."""
    op = operators()[index]
    results = []
    torch.set_num_threads(1)
    for engine in ENGINES:
        worst = ("equal", "")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = [
                    s
                    for s, _ in zip(
                        op.sample_inputs("cpu", torch.float64, requires_grad=True),
                        range(SAMPLES),
                        strict=False,
                    )
                ]
            except Exception:
                return []
            for sample in samples:
                try:
                    kind = _one(op, sample, engine)
                except Exception as error:
                    kind = ("error", f"{type(error).__name__}: {error}")
                worst = max(worst, kind, key=lambda k: RANKING[k[0]])
        results.append(Found(op.formatted_name, engine, *worst))
    return results


def indices(only: str = "") -> Iterator[int]:
    """The operators that are differentiable in float64."""
    for index, op in enumerate(operators()):
        if (
            only in op.formatted_name
            and op.supports_autograd
            and torch.float64 in op.supported_dtypes("cpu")
        ):
            yield index


@click.command()
@click.option("--jobs", default=2, show_default=True)
@click.option("--only", default="", help="only operators whose name contains this")
def main(jobs: int, only: str) -> None:
    """Compare every differentiable operator as a stage with autograd."""
    chosen = list(indices(only))
    counts: Counter[str] = Counter()
    bad = []
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=100) as pool:
        for results in track(pool.imap_unordered(sweep, chosen, chunksize=4), total=len(chosen)):
            for found in results:
                counts[f"{found.engine} {found.kind}"] += 1
                # Exceptions are refused or differ in last bits: a wrong number is never one.
                if found.kind not in ("equal", "fell back") and (
                    found.name not in EXCEPTIONS or found.kind in _WRONG
                ):
                    bad.append(found)
                    click.echo(f"{found.name} ({found.engine}) {found.kind}: {found.text[:240]}")
    click.echo(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
