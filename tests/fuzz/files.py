"""Hostile files: ``python -m tests.fuzz.files --mutations 1000``.

A mutation changes bytes, values or places of one file that fpipe reads: of a checkpoint, with or
without right hashes, of a run, a model, a plan, a schedule, costs. fpipe must read what the file
says, by an oracle that knows the format alone, or raise an error of its own, within seconds, and
must not touch the folder beside.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import click
import optree
import safetensors.torch
import torch
from rich.progress import track

import fpipe
from fpipe import Stage
from fpipe.errors import FpipeError
from fpipe.products.clusters.hardware import find_gpu
from fpipe.products.clusters.layout import Job, Layout
from fpipe.products.clusters.model import Model, read_model
from fpipe.products.clusters.plan_file import read_plan, write_plan
from fpipe.products.clusters.prediction import predict
from fpipe.products.command.cli import main as command
from fpipe.saving.hub import model_files

from .mutations import as_json, of_bytes, of_place, of_values

SECONDS = 30  #: for one mutation
MEMORY = 4 << 30  #: bytes of addresses beside those of the process
STEPS = 4


class WrongError(Exception):
    """A result that the file does not say."""


class Late(BaseException):
    """A reader that did not end."""


class Found(NamedTuple):
    """What became of a mutation."""

    seed: int
    name: str
    kind: str
    text: str


class Target(NamedTuple):
    """A kind of file: how it is made in a folder, changed there, and read, with a check of what was
    read.
    """

    make: Callable[[Path], object]
    change: Callable[[random.Random, Path, Path], str]
    read: Callable[[Path], object]


# ---- what is saved ----
def two(loss: Any = torch.sum) -> Any:
    """A pipeline of two stages."""
    stages = [Stage(torch.mul, name=name) for name in ("first", "last")]
    return fpipe.pipeline(stages, loss=loss, microbatches=1, group=fpipe.local(2))


def weights() -> list[Any]:
    """Its parameters."""
    return [{"w": torch.arange(6.0).view(2, 3)}, {"w": torch.ones(3)}]


def state() -> Any:
    """What is saved beside them."""
    return {"count": torch.tensor(7), "m": weights(), "rate": 0.1}


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    """Dtype, shape and bytes."""
    flat = tensor.detach().contiguous().view(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat
    return str(tensor.dtype)[6:], list(tensor.shape), bytes(raw.tolist())


def make_checkpoint(folder: Path) -> None:
    """``c``: a checkpoint."""
    fpipe.save(folder / "c", two(), params=weights(), state=state(), step=5)


def named(params: Any) -> dict[str, Any]:
    """The bits of the parameters by name."""
    return {name: bits(part["w"]) for name, part in zip(("first.w", "last.w"), params, strict=True)}


# ---- checkpoints ----
def any_file(draw: random.Random, folder: Path, outside: Path) -> str:
    """A file of a checkpoint with other bytes, or something else in its place."""
    path = draw.choice(sorted((folder / "c").iterdir()))
    if draw.random() < 0.3:
        return f"{path.name}: {of_place(draw, path, outside)}"
    path.write_bytes(of_bytes(draw, path.read_bytes()))
    return path.name


def read_checkpoint(folder: Path) -> None:
    """Loaded with the bits that were saved."""
    params, was, step = fpipe.load(folder / "c", two(), "params", "state", "step")
    leaves = [*optree.tree_leaves(params), *optree.tree_leaves(was)]
    wanted = [*optree.tree_leaves(weights()), *optree.tree_leaves(state())]
    if step != 5 or [*map(_plain, leaves)] != [*map(_plain, wanted)]:
        raise WrongError(f"{leaves} at step {step}")


def _plain(leaf: Any) -> Any:
    return bits(leaf) if isinstance(leaf, torch.Tensor) else leaf


def manifest_of(folder: Path) -> dict[str, Any]:
    """The rows of a manifest."""
    return json.loads((folder / "c" / "manifest.json").read_bytes())["manifest"]


def write_manifest(folder: Path, rows: Any) -> None:
    """With the right hash."""
    text = as_json(rows)
    digest = hashlib.sha256(text).hexdigest().encode()
    raw = b'{"sha256": "' + digest + b'",\n"manifest": ' + text + b"}\n"
    (folder / "c" / "manifest.json").write_bytes(raw)


def manifest(draw: random.Random, folder: Path, outside: Path) -> str:
    """A manifest with other values and the right hash."""
    before = manifest_of(folder)
    rows = of_values(draw, before)
    write_manifest(folder, rows)
    return as_json(rows)[:300].decode("utf-8", "replace")


def read_manifest(folder: Path) -> None:
    """Loaded as the manifest says, into the parameters that are expected."""
    path = folder / "c"
    for args in (["show", str(path)], ["show", str(path), "--leaves"], ["verify", str(path)]):
        run_command(["checkpoint", *args])
    with contextlib.suppress(FpipeError):
        fpipe.load(path, two(), "params", "state", "step")
    params, step = fpipe.load(path, two(), "params", "step", like=weights())
    rows = manifest_of(folder)
    if json.dumps(rows["trees"]["step"]) != json.dumps(["value", step]):
        raise WrongError(f"step {step}, where the manifest has {rows['trees']['step']}")
    for name, got in named(params).items():
        dtype, shape, _, pieces = rows["leaves"][rows["slots"]["params"][name][1]]
        raw = b"".join((path / piece[2]).read_bytes()[piece[3] : piece[4]] for piece in pieces)
        like = named(weights())[name][:2]
        if got != (dtype, shape, raw) or got[:2] != like:
            raise WrongError(f"{name}: {got}, where the manifest has {dtype}{shape} {raw!r}")


def changed_header(draw: random.Random, raw: bytes) -> bytes:
    """A safetensors file with another header, whose length is right."""
    length = int.from_bytes(raw[:8], "little")
    text = as_json(of_values(draw, json.loads(raw[8 : 8 + length])))
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def header(draw: random.Random, folder: Path, outside: Path) -> str:
    """A header of another content, whose hash is right in a manifest whose hash is right."""
    rows = manifest_of(folder)
    (name,) = rows["files"]
    path = folder / "c" / name
    before = path.read_bytes()
    raw = changed_header(draw, before)
    path.write_bytes(raw)
    length = 8 + int.from_bytes(raw[:8], "little")
    moved = len(raw) - len(before)
    rows["files"][name] = [len(raw), length, hashlib.sha256(raw[:length]).hexdigest()]
    for *_, pieces in rows["leaves"].values():
        for piece in pieces:
            piece[3] += moved
            piece[4] += moved
    write_manifest(folder, rows)
    return raw[8:length].decode("utf-8", "replace")[:300]


def leftovers(draw: random.Random, folder: Path, outside: Path) -> str:
    """A checkpoint that was not completed, with files of others in its folder."""
    path = folder / "c"
    (path / "manifest.json").unlink()
    name = draw.choice(("00000.0.json", ".0.part", "00000-00000.safetensors", "notes.txt"))
    (path / name).write_bytes(draw.randbytes(20))
    if draw.random() < 0.5:
        return f"{name}: {of_place(draw, path / name, outside)}"
    return name


def save_again(folder: Path) -> None:
    """Written again, and loaded."""
    make_checkpoint(folder)
    read_checkpoint(folder)


# ---- files of models ----
def make_tensors(folder: Path) -> None:
    """``m``: the files of a model."""
    (folder / "m").mkdir()
    for name, part in zip(("first", "last"), weights(), strict=True):
        safetensors.torch.save_file({f"{name}.w": part["w"]}, folder / "m" / f"{name}.safetensors")


def tensors(draw: random.Random, folder: Path, outside: Path) -> str:
    """A file with another header, other bytes, or something else in its place."""
    path = draw.choice(sorted((folder / "m").iterdir()))
    how = draw.random()
    if how < 0.2:
        return f"{path.name}: {of_place(draw, path, outside)}"
    change = changed_header if how < 0.7 else of_bytes
    path.write_bytes(change(draw, path.read_bytes()))
    return path.name


def read_tensors(folder: Path) -> None:
    """As the package safetensors reads them."""
    like = weights() if len(folder.name) % 2 else None
    params = fpipe.receive(two(), folder / "m", like=like)
    found: dict[str, Any] = {}
    for path in sorted((folder / "m").glob("*.safetensors")):
        found |= {name: bits(t) for name, t in safetensors.torch.load_file(path).items()}
    streamed = {name: bits(tensor) for name, tensor in fpipe.stream(two(), params)}
    if found != streamed:
        raise WrongError(f"{streamed}, where safetensors has {found}")


def make_experts(folder: Path) -> None:
    """``m``: a model with single experts."""
    (folder / "m").mkdir()
    one = {"gate_proj": (2, 3), "up_proj": (2, 3), "down_proj": (3, 2)}
    rows = {
        f"first.experts.{e}.{name}.weight": torch.full(shape, float(e))
        for e in range(3)
        for name, shape in one.items()
    }
    safetensors.torch.save_file(rows, folder / "m" / "model.safetensors")


def experts(draw: random.Random, folder: Path, outside: Path) -> str:
    """Experts that are missing, are others, or have other shapes."""
    path = folder / "m" / "model.safetensors"
    rows = safetensors.torch.load_file(path)
    for _ in range(draw.choice((1, 2))):
        name = draw.choice(sorted(rows))
        tensor = rows.pop(name)
        act = draw.choice(("missing", "number", "shape", "dtype", "name"))
        if act == "number":
            number = draw.choice(("7", "00", "-1", "\u0661", "99999999999999999999", "x"))
            rows[re.sub(r"\.\d+\.", f".{number}.", name)] = tensor
        elif act == "shape":
            rows[name] = torch.ones(draw.choice(((1, 1), (2,), (), (0, 3), (2, 4))))
        elif act == "dtype":
            rows[name] = tensor.to(draw.choice((torch.int64, torch.float16, torch.bool)))
        elif act == "name":
            rows[name.replace("experts", draw.choice(("expert", "experts.0", "")))] = tensor
    safetensors.torch.save_file(rows, path)
    return ", ".join(sorted(rows))


def read_experts(folder: Path) -> None:
    """Joined to the tensors of all experts."""
    stages = [Stage(torch.mul, name="first"), Stage(torch.mul, name="last")]
    pipe = fpipe.pipeline(stages[:1], loss=torch.sum, microbatches=1, group=fpipe.local(1))
    (part,) = fpipe.receive(pipe, lambda: model_files(folder / "m"))
    rows = safetensors.torch.load_file(folder / "m" / "model.safetensors")
    joined = part["experts"].get("gate_up_proj")
    if joined is not None:
        wanted = [
            torch.cat([rows[f"first.experts.{e}.{name}_proj.weight"] for name in ("gate", "up")])
            for e in range(len(joined))
        ]
        if bits(joined) != bits(torch.stack(wanted)):
            raise WrongError(f"{joined}, where the file has {wanted}")


# ---- plans ----
PLAIN = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128}
CONFIG = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
}


def make_plan(folder: Path) -> None:
    """``plan.toml``."""
    model = Model("tiny", "llama", 64, 4, 4, 128, 128)
    job = Job(model, 4, find_gpu("h100"), batch=8, sequence=32)
    layout = Layout(pp=2, dp=2, schedule="VHalf", per_rank=2, recompute="selective")
    (folder / "plan.toml").write_text(write_plan(predict(job, layout)))


def plan(draw: random.Random, folder: Path, outside: Path) -> str:
    """A plan with other values, or other bytes."""
    path = folder / "plan.toml"
    how = draw.random()
    if how < 0.05:
        return of_place(draw, path, folder)
    if how < 0.5:
        raw = of_bytes(draw, path.read_bytes())
    else:
        raw = _toml(of_values(draw, tomllib.loads(path.read_text())))
    path.write_bytes(raw)
    return raw[:600].decode("utf-8", "replace")


def _toml(values: Any) -> bytes:
    if not isinstance(values, dict):
        return as_json(values)
    lines: list[str] = []
    for name, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{json.dumps(name)}]"]
            lines += [f"{json.dumps(key)} = {_value(value)}" for key, value in table.items()]
        else:
            lines.insert(0, f"{json.dumps(name)} = {_value(table)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _value(value: Any) -> str:
    text = as_json(value).decode("utf-8", "surrogatepass")
    return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", "null": '""'}.get(text, text)


def read_the_plan(folder: Path) -> None:
    """What the tables say, with numbers that can be."""
    path = folder / "plan.toml"
    found = read_plan(path)
    tables = tomllib.loads(path.read_text())
    sizes = tables["model"]
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden"] // sizes["heads"]
    layout = asdict(found.layout)
    said = {
        "model": asdict(found.job.model),
        "gpu": asdict(found.job.gpu),
        "job": {name: getattr(found.job, name) for name in ("gpus", "batch", "sequence")},
        "layout": {**layout, "layers": list(layout["layers"])},
    }
    for name, table in said.items():
        if json.dumps(table, sort_keys=True) != json.dumps(tables[name], sort_keys=True):
            raise WrongError(f"[{name}] {table}, where the file has {tables[name]}")
    numbers = [found.step, found.flops, found.mfu, *(part.total for part in found.memory)]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise WrongError(f"{numbers}")
    if not 0 <= found.bubble < 1 or not all(part >= 0 for part in found.parts.values()):
        raise WrongError(f"bubble {found.bubble}, parts {found.parts}")
    path.write_text(write_plan(found))
    if read_plan(path) != found:
        raise WrongError("another plan after it was written")


def make_config(folder: Path) -> None:
    """``config.json``."""
    (folder / "config.json").write_text(json.dumps(CONFIG))


def config(draw: random.Random, folder: Path, outside: Path) -> str:
    """A config.json with other values, or other bytes."""
    path = folder / "config.json"
    how = draw.random()
    if how < 0.05:
        return of_place(draw, path, folder)
    raw = path.read_bytes()
    if draw.random() < 0.3:
        raw = json.dumps(PLAIN).encode()
    raw = of_bytes(draw, raw) if how < 0.4 else as_json(of_values(draw, json.loads(raw)))
    path.write_bytes(raw)
    return raw[:600].decode("utf-8", "replace")


def read_config(folder: Path) -> None:
    """The sizes that the file has."""
    path = folder / "config.json"
    found = read_model(path)
    given = json.loads(path.read_bytes())
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "vocabulary": "vocab_size"}
    if found.experts:
        names |= {"experts": "num_experts", "feed_forward": "moe_intermediate_size"}
    for name, key in names.items():
        value = getattr(found, name)
        if type(value) is not int or value < 0 or value != given.get(key, value):
            raise WrongError(f"{name} is {value!r}, where the file has {given.get(key)!r}")
    job = Job(found, 2, find_gpu("h100"), batch=4, sequence=64)
    step = predict(job, Layout(pp=2)).step
    if not 0 < step < math.inf:
        raise WrongError(f"a step of {step} s")


# ---- schedules and costs ----
def make_schedule(folder: Path) -> None:
    """``s.csv`` and ``s.txt``."""
    schedule = fpipe.make_schedule("DualPipeV", ranks=3, microbatches=6)
    schedule.to_csv(folder / "s.csv")
    (folder / "s.txt").write_text(str(schedule))


def schedule(draw: random.Random, folder: Path, outside: Path) -> str:
    """Other bytes of both."""
    for name in ("s.csv", "s.txt"):
        path = folder / name
        raw = path.read_bytes()
        for _ in range(draw.choice((1, 1, 2))):
            raw = of_bytes(draw, raw)
        path.write_bytes(raw)
    if draw.random() < 0.05:
        return of_place(draw, folder / "s.csv", folder)
    return raw[:300].decode("utf-8", "replace")


def read_schedule(folder: Path) -> None:
    """The actions of the text, which are run once each, in a time that can be."""
    errors = []
    for name in ("s.csv", "s.txt"):
        path = folder / name
        try:
            if name == "s.csv":
                run_command(["check", str(path)])
                found = fpipe.Schedule.from_csv(path)
                text = path.read_bytes().decode()
            else:
                text = path.read_bytes().decode("utf-8", "replace")
                found = fpipe.Schedule.parse(text)
            _check_rows(found, text)
            found.check()
            total = found.simulate().total
        except FpipeError as error:
            errors.append(error)
            continue
        if not 0 <= total < math.inf or fpipe.Schedule.parse(str(found)) != found:
            raise WrongError(f"{name}: {total} for {found}")
    if errors:
        raise errors[0]


def _check_rows(found: Any, text: str) -> None:
    """Every action of the text, by its characters alone, is in the rows in this order."""
    pattern = r"[0-9]+[FBIW][0-9]+(?:\.[0-9]+)?"
    kept = re.sub(r"[0-9]+(?:WAIT_)?(?:SEND|RECV|UNSHARD|RESHARD|REDUCE_GRAD)\w*", "", text)
    wanted = re.findall(pattern, kept)
    if (got := re.findall(pattern, str(found))) != wanted:
        raise WrongError(f"{got}, where the file has {wanted}")


def make_costs(folder: Path) -> None:
    """``costs.json``."""
    costs = fpipe.Costs(F=[1, 2], I=1, W=[0.5, 1], B=None, comm=0.1, saved=10, kept=[1, 2])
    (folder / "costs.json").write_text(costs.to_json())


def costs(draw: random.Random, folder: Path, outside: Path) -> str:
    """Costs with other values, or other bytes."""
    path = folder / "costs.json"
    raw = path.read_bytes()
    raw = of_bytes(draw, raw) if draw.random() < 0.4 else as_json(of_values(draw, json.loads(raw)))
    path.write_bytes(raw)
    return raw[:300].decode("utf-8", "replace")


def read_costs(folder: Path) -> None:
    """The numbers of the file, and a simulation that ends with numbers."""
    path = folder / "costs.json"
    draw = ["draw", "1F1B", "--ranks", "2", "--microbatches", "2", "--costs", str(path)]
    run_command(draw)
    for kind in ("svg", "html", "json"):
        run_command([*draw, "--out", str(folder / f"p.{kind}")])
    text = path.read_bytes().decode("utf-8", "replace")
    found = fpipe.Costs.from_json(text)
    for name, value in json.loads(text).items():
        got = getattr(found, name)
        wanted = [*map(float, value)] if isinstance(value, (list, dict)) else value
        if (list(got) if isinstance(got, tuple) else got) != (
            wanted if isinstance(wanted, (list, str, type(None))) else float(wanted)
        ):
            raise WrongError(f"{name} is {got!r}, where the file has {value!r}")
    if fpipe.Costs.from_json(found.to_json()) != found:
        raise WrongError("other costs after they were written")
    timeline = fpipe.make_schedule("ZBH1", ranks=2, microbatches=2).simulate(found)
    numbers = [timeline.total, timeline.span, timeline.bubble, *timeline.peak]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise WrongError(f"{numbers}")


# ---- runs ----
def run_to(path: Path | None, steps: int) -> Any:
    """A run of the loop, or its continuation."""
    data = lambda step: (torch.full((1,), 1.0 + step),)
    loop = fpipe.Loop(two(), fpipe.adamw(0.1), path, every=1, keep=2)
    return loop.run([torch.ones(1), torch.full((1,), 2.0)], data, steps).params


@functools.lru_cache(maxsize=1)
def right() -> list[Any]:
    """The parameters of a run that nothing disturbed."""
    return [bits(leaf) for leaf in run_to(None, STEPS)]


def make_run(folder: Path) -> None:
    """``r``: a run of some steps."""
    run_to(folder / "r", STEPS - 1)


def run_folder(draw: random.Random, folder: Path, outside: Path) -> str:
    """Something else in place of a checkpoint or the log, or another name."""
    path = draw.choice(sorted((folder / "r").iterdir()))
    if draw.random() < 0.3 and path.is_dir():
        name = draw.choice(
            ("step-000000009", "step-9", "step-99999999999999", "step-", "step-\u0661")
        )
        path.rename(path.with_name(name))
        return f"{path.name} is {name}"
    if draw.random() < 0.4 and path.is_dir():
        inner = draw.choice(sorted(path.iterdir()))
        return f"{path.name}/{inner.name}: {of_place(draw, inner, outside)}"
    return f"{path.name}: {of_place(draw, path, outside)}"


def log(draw: random.Random, folder: Path, outside: Path) -> str:
    """A log of other bytes or values."""
    path = folder / "r" / "log.jsonl"
    raw = path.read_bytes()
    if draw.random() < 0.5:
        raw = of_bytes(draw, raw)
    else:
        lines = [json.loads(line) for line in raw.splitlines()]
        lines[1] = of_values(draw, lines[1])
        raw = b"\n".join(map(as_json, lines)) + b"\n"
    path.write_bytes(raw)
    return raw[:300].decode("utf-8", "replace")


def read_run(folder: Path) -> None:
    """It goes on to the parameters of a run that nothing disturbed, with a log of records."""
    path = folder / "r" / "log.jsonl"
    regular = path.is_file() and not path.is_symlink()
    before = path.read_bytes().split(b"\n") if regular else []
    params = run_to(folder / "r", STEPS)
    if [bits(leaf) for leaf in params] != right():
        raise WrongError(f"{params}")
    if regular:
        lines = path.read_bytes().splitlines()
        if not all(line in before or json.loads(line)["step"] <= STEPS for line in lines):
            raise WrongError(f"the log has {lines}")
        if json.loads(lines[-1])["step"] != STEPS:
            raise WrongError(f"the log ends with {lines[-1]!r}")


TARGETS = {
    "checkpoint": Target(make_checkpoint, any_file, read_checkpoint),
    "manifest": Target(make_checkpoint, manifest, read_manifest),
    "header": Target(make_checkpoint, header, read_checkpoint),
    "leftovers": Target(make_checkpoint, leftovers, save_again),
    "tensors": Target(make_tensors, tensors, read_tensors),
    "experts": Target(make_experts, experts, read_experts),
    "plan": Target(make_plan, plan, read_the_plan),
    "config": Target(make_config, config, read_config),
    "schedule": Target(make_schedule, schedule, read_schedule),
    "costs": Target(make_costs, costs, read_costs),
    "log": Target(make_run, log, read_run),
    "run": Target(make_run, run_folder, read_run),
}
#: Manifests and the rest of a checkpoint are most of what can go wrong.
ORDER = [*TARGETS, "manifest", "manifest", "plan", "schedule", "tensors"]


# ---- one mutation ----
def run_command(words: list[str]) -> None:
    """The command line ends with a status and no traceback."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = command(words)
    if status not in (0, 1, 2) or "Traceback" in out.getvalue():
        raise WrongError(f"fpipe {' '.join(words)}: status {status}, {out.getvalue()[-500:]}")


class Beside:
    """A folder beside the files, of which nothing may be opened, written or removed."""

    #: Those that are watched now; a hook of Python stays for ever.
    watched: ClassVar[list[Beside]] = []

    def __init__(self, path: Path):
        self.path, self.touched = str(path), list[str]()
        path.mkdir()
        safetensors.torch.save_file(
            {"first.w": torch.full((2, 3), 9.0)}, path / "secret.safetensors"
        )
        self.before = self.content()

    def content(self) -> list[Any]:
        """What is in the folder."""
        return [(p.name, p.read_bytes()) for p in sorted(Path(self.path).iterdir())]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Until the end of the block."""
        if not hasattr(sys, "_fpipe_fuzz_hook"):
            sys.addaudithook(_hook)
            sys._fpipe_fuzz_hook = True  # type: ignore[attr-defined]
        self.watched.append(self)
        try:
            yield
        finally:
            self.watched.remove(self)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not Beside.watched or not event.startswith(("open", "os.", "shutil.")):
        return
    for beside in list(Beside.watched):
        follows = event != "open" or not (isinstance(args[2], int) and args[2] & os.O_NOFOLLOW)
        for path in args[: 1 if event == "open" else 2]:
            if not isinstance(path, (str, Path)) or "\0" in str(path):
                continue
            folder, name = os.path.split(os.path.abspath(path))
            real = os.path.realpath(path) if follows and event == "open" else ""
            real = real or os.path.join(os.path.realpath(folder), name)
            if real.startswith((beside.path, "/etc/passwd")) and "listdir" not in event:
                beside.touched.append(f"{event} {path}")


@functools.cache
def original(name: str) -> Path:
    """A folder with the files of a target, which is copied for each mutation."""
    folder = Path(tempfile.mkdtemp(prefix="fpipe-fuzz-"))
    TARGETS[name].make(folder)
    return folder


def run(seed: int) -> Found:
    """One mutation."""
    draw = random.Random(seed)
    name = ORDER[seed % len(ORDER)]
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="fpipe-fuzz-") as top:
        folder, beside = Path(top, "files" + "x" * (seed % 2)), Beside(Path(top, "outside"))
        shutil.copytree(original(name), folder)
        what = target.change(draw, folder, Path(beside.path))
        kind, text = _judged(target, folder, beside)
        if beside.touched or beside.content() != beside.before:
            kind, text = "outside", f"{beside.touched}"
    return Found(seed, f"{name}: {what}", kind, text)


def _judged(target: Target, folder: Path, beside: Beside) -> tuple[str, str]:
    """A verdict: "right", "error", which is one of fpipe, or what is wrong."""

    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    began = time.monotonic()
    try:
        with warnings.catch_warnings(), beside.watching():
            warnings.simplefilter("ignore")
            target.read(folder)
        return "right", ""
    except FpipeError as error:
        return _worded(error)
    except OSError as error:
        if error.filename is None or target.read not in (read_the_plan, read_config):
            return "raw", traceback.format_exc(limit=-6)
        return "error", str(error)  # the documentation of these says so
    except WrongError as error:
        return "wrong", str(error)
    except Late:
        return "late", f"{time.monotonic() - began:.0f} s: {traceback.format_exc(limit=-6)}"
    except BaseException:
        return "raw", traceback.format_exc(limit=-8)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _worded(error: FpipeError) -> tuple[str, str]:
    """An error says what is wrong and what to do, on a page."""
    text = str(error)
    if not text.strip() or len(text) > 4000 or (";" not in text and ":" not in text):
        return "words", text[:1000]
    return "error", text


# ---- many ----
def _start() -> None:
    torch.set_num_threads(1)
    used = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


@click.command()
@click.option("--mutations", default=1000, show_default=True)
@click.option("--first", default=0, show_default=True, help="the first seed")
@click.option("--mutation", "seed", type=int, help="run one, and print it")
@click.option("--jobs", default=2, show_default=True)
def main(mutations: int, first: int, seed: int | None, jobs: int) -> None:
    """Read files that were changed at random."""
    if seed is not None:
        found = run(seed)
        click.echo(f"{found.name}\n{found.kind}: {found.text}")
        raise SystemExit(found.kind not in ("right", "error"))
    counts: Counter[str] = Counter()
    by_name: dict[str, Counter[str]] = {name: Counter() for name in TARGETS}
    seeds = range(first, first + mutations)
    with multiprocessing.get_context("spawn").Pool(jobs, _start) as pool:
        for found in track(pool.imap_unordered(run, seeds, chunksize=4), total=mutations):
            counts[found.kind] += 1
            by_name[found.name.partition(":")[0]][found.kind] += 1
            if found.kind not in ("right", "error"):
                click.echo(f"{found.seed} {found.kind} {found.name[:700]}\n{found.text[:3000]}")
    for name, of_name in by_name.items():
        click.echo(f"{name:12}" + ", ".join(f"{n} {kind}" for kind, n in of_name.most_common()))
    click.echo(
        f"{counts.total()} mutations: " + ", ".join(f"{n} {k}" for k, n in counts.most_common())
    )
    raise SystemExit(bool(counts.keys() - {"right", "error"}))


if __name__ == "__main__":
    main()
