"""Checkpoints that do not fit, are damaged or malicious: one error names the fault, and nothing
outside is touched.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import fpipe
from checkpoint_model import Layout, pipeline
from common import same
from fpipe import Stage
from fpipe.errors import CheckpointError
from fpipe.saving.files import header, opened
from fpipe.saving.hub import fused
from fpipe.saving.manifest import Manifest
from fpipe.transforms.optimizers import AdamState

ALONE = Layout(4, "1F1B", 2)
ROOT = Path(fpipe.__file__).parent.parent


def two(names: tuple[str, str] = ("first", "last"), **options: Any) -> Any:
    """A pipeline of two stages that are never run."""
    stages = [Stage(lambda p, x: x, name=name) for name in names]
    return fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2), **options)


def weights(**more: Tensor) -> list[Any]:
    return [{"w": torch.arange(6.0).view(2, 3)}, {"w": torch.ones(3), **more}]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of ``weights``, with a state."""
    state = {"count": torch.tensor(7), "m": weights(), "rate": 0.1}
    fpipe.save(tmp_path / "c", two(), params=weights(), state=state, step=5)
    return tmp_path / "c"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint with another manifest, whose hash is right."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())["manifest"]
    change(content)
    content["files"] = {name: tuple(row) for name, row in content["files"].items()}
    path.unlink()
    Manifest(**content).write(folder)
    return folder


# ---- other models ----
@pytest.mark.parametrize(
    ("like", "fault"),
    [
        (weights(b=torch.ones(2)), r"'last\.b', float32\[2\], of stage 1 is missing"),
        (
            [{"w": torch.ones(2, 2)}, {"w": torch.ones(3)}],
            r"'first\.w' is float32\[2, 3\], and .* takes .*\[2, 2\]",
        ),
        (
            [{"w": torch.ones(2, 3).half()}, {"w": torch.ones(3)}],
            r"'first\.w' is float32.*takes float16\[2, 3\]",
        ),
        ([{"w": torch.ones(2, 3)}, {}], r"a parameter 'last\.w' that no stage takes"),
    ],
)
def test_another_model_is_refused_or_reported(saved: Path, like: list[Any], fault: str):
    with pytest.raises(CheckpointError, match=fault):
        fpipe.load(saved, two(), "params", like=like)
    with pytest.warns(UserWarning, match=fault):
        params = fpipe.load(saved, two(), "params", like=like, strict=False)
    stored, wanted = (
        dict(zip(fpipe.tree.names(t), optree.tree_leaves(t), strict=True))
        for t in (weights(), like)
    )
    for name, leaf in zip(fpipe.tree.names(params), optree.tree_leaves(params), strict=True):
        fits = name in stored and str(fpipe.tree.Spec.of(stored[name])) == str(
            fpipe.tree.Spec.of(wanted[name])
        )
        assert same(leaf, stored[name] if fits else wanted[name])


def test_the_folder_of_a_run_names_a_checkpoint_in_it(saved: Path):
    with pytest.raises(CheckpointError, match=r"no manifest.*such as .*/c$"):
        fpipe.load(saved.parent, two(), "params")


def test_another_stage_is_named(saved: Path):
    with pytest.raises(CheckpointError, match="no stage or part 'end'; it has 'first', 'last'"):
        fpipe.load(saved, two(("first", "end")), "params")
    with pytest.raises(CheckpointError, match="has 'params', 'state', 'step', not 'epoch'"):
        fpipe.load(saved, two(), "epoch")


def test_a_layer_that_was_not_saved_is_named(tmp_path: Path):
    pipe, params = pipeline(ALONE)
    fpipe.save(tmp_path / "c", pipe, params=params)
    stages = [Stage(lambda p, x: x, name="blocks", layers=span) for span in (range(3), range(3, 7))]
    other = fpipe.pipeline(stages, loss=torch.sum, microbatches=2, group=fpipe.local(2))
    with pytest.raises(CheckpointError, match=r"no layer blocks\.6; it has 0, 1, 2, 3, 4, 5"):
        fpipe.load(tmp_path / "c", other, "params")


# ---- trees that cannot be saved ----
class Odd:
    """Of a class that no checkpoint holds."""


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"state": {"odd": Odd()}}, "state.odd is of type .*Odd"),
        ({"state": torch.ones(2).to_sparse()}, "state: a tensor .*safetensors cannot hold"),
        ({"state": {(1, 2): 3}}, r"a dict with the key \(1, 2\)"),
        ({"strict": 1}, "'strict' is an argument of load"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, more: dict[str, Any], fault: str):
    with pytest.raises(CheckpointError, match=fault):
        fpipe.save(tmp_path / "c", two(), params=weights(), **more)
    assert not (tmp_path / "c").exists()


def test_two_leaves_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"both called 'block\.w'; give stages different names"
    ):
        fpipe.save(
            tmp_path / "c",
            two(("block", "block")),
            params=[{"w": torch.ones(2)}, {"w": torch.ones(2)}],
        )


def test_tied_leaves_that_differ_are_refused(tmp_path: Path):
    pipe = two(tied=[("0.w", "1.w")])
    with pytest.raises(
        CheckpointError, match=r"first\.w' has different values on stage 0 on rank 0 and stage 1"
    ):
        fpipe.save(
            tmp_path / "c", pipe, params=[{"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])}]
        )
    assert not (tmp_path / "c" / "manifest.json").exists()
    fpipe.save(tmp_path / "c", pipe, params=[{"w": torch.ones(2)}, {"w": torch.ones(2)}])
    assert sum(leaf.bytes for leaf in Manifest.read(tmp_path / "c").leaves.values()) == 8, (
        "written once"
    )


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"other files, such as 'notes\.txt'"):
        fpipe.save(tmp_path, two(), params=weights())
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_every_kind_of_leaf_and_container_comes_back(tmp_path: Path):
    class_of = fpipe.transforms.optimizers.AdamState if hasattr(fpipe, "transforms") else None

    assert class_of is None or class_of is AdamState
    dtypes = [
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.int8,
        torch.float8_e4m3fn,
    ]
    state = {
        "dtypes": [torch.tensor([1, 0, 1]).to(dtype) for dtype in dtypes],
        "empty": torch.empty(0, 3),
        "named": AdamState(torch.tensor(1), weights(), ()),
        "numbers": (1, 2.5, float("inf"), True, None, "text", 1 - 2j),
        "sets": [{1, "a"}, frozenset([(2,)])],
        "torch": [torch.Size([2, 3]), torch.device("meta"), torch.return_types.max((1, 2))],
        "dtype": torch.float16,
        3: torch.arange(6.0).view(2, 3).T,
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    fpipe.save(tmp_path / "c", two(), params=weights(), state=state)
    loaded = fpipe.load(tmp_path / "c", two(), "state")
    assert same(loaded, state) and type(loaded["named"]) is AdamState


# ---- damaged files ----
def test_one_flipped_byte_in_any_file_is_noticed(saved: Path):
    pipe = two()
    for file in saved.iterdir():
        raw = file.read_bytes()
        for at in {0, 9, len(raw) // 3, len(raw) // 2, len(raw) - 1}:
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
            with pytest.raises(CheckpointError, match="damaged"):
                fpipe.load(saved, pipe, "params", "state", "step")
            if file.suffix == ".safetensors":
                assert list(Manifest.read(saved).faults(saved))
        file.write_bytes(raw)
    assert not list(Manifest.read(saved).faults(saved))


def test_an_incomplete_checkpoint_is_never_loaded(saved: Path):
    (saved / "manifest.json").rename(saved / "manifest.old")
    with pytest.raises(CheckpointError, match="has no manifest, so it was not completed"):
        fpipe.load(saved, two(), "params")
    (saved / "manifest.old").rename(saved / "manifest.json")
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        fpipe.load(saved, two(), "params")
    with pytest.raises(CheckpointError, match="is no folder"):
        fpipe.load(saved / "other", two(), "params")


def test_an_incomplete_folder_is_written_again(saved: Path):
    (saved / "manifest.json").unlink()
    (saved / f".{'0' * 16}.part").write_text("")
    fpipe.save(saved, two(), params=weights(), step=6)
    assert fpipe.load(saved, two(), "step") == 6
    assert len(list(saved.iterdir())) == 2


def test_a_process_that_cannot_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a full disk; the folder is then written anew."""

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fpipe.saving.writing.write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            fpipe.save(tmp_path / "c", two(), params=weights())
    with pytest.raises(CheckpointError, match="no manifest"):
        fpipe.load(tmp_path / "c", two(), "params")
    fpipe.save(tmp_path / "c", two(), params=weights())
    assert same(fpipe.load(tmp_path / "c", two(), "params"), weights())


def test_a_failed_save_has_ended_when_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even the list of its files could be written: no thread waits for it."""

    def full(*args: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fpipe.saving.writing.write", full)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        fpipe.save(tmp_path / "c", two(), params=weights())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fpipe-save")]


def test_a_load_waits_for_the_save_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``save(wait=False)`` and then ``load``: the folder has no manifest yet."""
    go, write = threading.Event(), Manifest.write
    monkeypatch.setattr(Manifest, "write", lambda *args: go.wait(5) and write(*args))
    fpipe.save(tmp_path / "c", two(), params=weights(), step=3, wait=False)
    threading.Timer(0.05, go.set).start()
    assert fpipe.load(tmp_path / "." / "c", two(), "step") == 3


ENDS = """
import functools, pathlib, sys, fpipe.saving.writing as save
job = save._Job(pathlib.Path(sys.argv[1]), "0", 0, [0, 1], float("inf"), False)
start = functools.partial(save.in_thread, name=save.writer_of(job.folder), daemon=False)
write = start(lambda: job.write([]))
start(lambda: job.complete(None, write))
"""


def test_a_program_that_ends_gives_up_the_list_of_another_process(tmp_path: Path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, timeout=60, cwd=ROOT)


# ---- malicious files ----
class Payload(NamedTuple):
    """What a pickle would run."""

    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_is_refused_and_not_run(saved: Path, tmp_path: Path):
    raw = pickle.dumps(Payload(str(tmp_path / "ran")))
    for name in ("manifest.json", next(saved.glob("*.safetensors")).name):
        before = (saved / name).read_bytes()
        (saved / name).write_bytes(raw)
        with pytest.raises(CheckpointError, match="damaged"):
            fpipe.load(saved, two(), "params", "state", "step")
        (saved / name).write_bytes(before)
    (tmp_path / "x.safetensors").write_bytes(raw)
    with (
        opened(tmp_path, "x.safetensors") as file,
        pytest.raises(CheckpointError, match="no safetensors file"),
    ):
        header(file, "x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "..", ".hidden", "a/b", "", "x\0y"]
)
def test_a_manifest_that_names_outside_files_is_refused(saved: Path, name: str):
    def change(content: dict[str, Any]) -> None:
        (old, row), *_ = content["files"].items()
        content["files"] = {name: row}
        for leaf in content["leaves"].values():
            for piece in leaf[3]:
                piece[2] = name
        assert old

    (saved.parent / "secret.safetensors").write_bytes(
        next(saved.glob("*.safetensors")).read_bytes()
    )
    with pytest.raises(CheckpointError, match="is no name of a file"):
        fpipe.load(rewritten(saved, change), two(), "params")


def test_links_of_the_cache_of_the_hub_are_followed(tmp_path: Path):
    """``snapshots`` has links to ``blobs``; other links of a folder are refused, and one that is
    named is not.
    """
    package = pytest.importorskip("safetensors.torch")
    rows = {"first.w": torch.ones(2), "last.w": torch.zeros(2)}
    blob = tmp_path / "models--a--b" / "blobs" / "0123456789abcdef"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    other = tmp_path / "models--a--c" / "snapshots" / "main"
    for folder in (blob.parent, snapshot, other):
        folder.mkdir(parents=True)
    package.save_file(rows, blob)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    want = [{"w": rows["first.w"]}, {"w": rows["last.w"]}]
    assert same(fpipe.receive(two(), snapshot), want)
    assert same(fpipe.receive(two(), snapshot / "model.safetensors"), want)
    (other / "model.safetensors").symlink_to(blob)
    with pytest.raises(CheckpointError, match="a symbolic link, which is not followed"):
        fpipe.receive(two(), other)
    assert same(fpipe.receive(two(), other / "model.safetensors"), want)
    (other / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(CheckpointError, match="a symbolic link, which is not followed"):
        fpipe.receive(two(), other)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w3"], "two tensors for .*mlp.exp"),
        (["mlp.gate.weight", "block_sparse_moe.gate.weight"], "two tensors for 'mlp.gate.weight'"),
        (["mlp.experts.down_proj", "mlp.experts.0.down_proj"], "two tensors for .*down_proj'"),
    ],
)
def test_one_tensor_under_two_names_is_refused(names: list[str], fault: str):
    """The last one was taken."""
    whole = ("gate.weight", "experts.down_proj")
    rows = {name if name.endswith(whole) else f"{name}.weight": list for name in names}
    with pytest.raises(CheckpointError, match=fault):
        fused(rows)  # type: ignore[arg-type]
    assert list(fused({"mlp.experts.00.up_proj.weight": list})) == [  # type: ignore[dict-item]
        "mlp.experts.00.up_proj.weight"
    ], "no number"


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_links_and_devices_are_refused(saved: Path, kind: str):
    file = next(saved.glob("*.safetensors"))
    file.rename(saved.parent / "target")
    if kind == "link":
        file.symlink_to(saved.parent / "target")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(CheckpointError, match=r"symbolic link|regular file|directory"):
        fpipe.load(saved, two(), "params")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["leaves"]["params/last.w"].__setitem__(1, [1 << 60]),
        lambda c: c["leaves"]["params/last.w"].__setitem__(1, [-3]),
        lambda c: c["leaves"]["params/last.w"].__setitem__(0, "object"),
        lambda c: c["leaves"]["params/last.w"][3][0].__setitem__(4, 1 << 60),
        lambda c: c["leaves"]["params/last.w"].__setitem__(3, []),
        lambda c: c["leaves"]["params/last.w"][3].append(c["leaves"]["params/last.w"][3][0]),
        lambda c: c["files"].clear(),
        lambda c: c["trees"].__setitem__("params", ["named", "os", "path", []]),
        lambda c: c["trees"].__setitem__("params", ["node", "os", "path", ["none"], []]),
        lambda c: c["trees"].__setitem__(
            "params", ["node", "optree.functools", "partial", ["value", "print"], []]
        ),
        lambda c: c["trees"].__setitem__("params", ["run", "rm"]),
        lambda c: c["trees"].__setitem__("params", 5),
        lambda c: c["stages"].__setitem__("last", ["leaf", "state.count"]),
        lambda c: c.__setitem__("leaves", []),
        lambda c: c.__setitem__("format", 2),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(
    saved: Path, change: Callable[[Any], object]
):
    with pytest.raises(CheckpointError):
        fpipe.load(rewritten(saved, change), two(), "params")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        b"\2" + b"\0" * 7 + b"[]",
        b"\3" + b"\0" * 7 + b"{}",
        b"\2" + b"\0" * 7 + b"{}x",
        *(
            len(text).to_bytes(8, "little") + text + b"\0" * 8
            for text in (
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
                b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
                b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
                b'{"a":7}',
            )
        ),
    ],
    ids=range(13),
)
def test_headers_that_safetensors_does_not_allow_are_refused(tmp_path: Path, raw: bytes):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with (
        opened(tmp_path, "x.safetensors") as file,
        pytest.raises(CheckpointError, match="no safetensors file"),
    ):
        header(file, "x")


def test_files_are_those_of_the_safetensors_package(saved: Path, tmp_path: Path):
    """In both directions, with the package as the oracle."""
    numpyless = pytest.importorskip("safetensors.torch")
    (file,) = saved.glob("*.safetensors")
    tensors = numpyless.load_file(file)
    assert same(tensors["params/first.w"], weights()[0]["w"]) and tensors["state.count"] == 7
    numpyless.save_file(tensors, tmp_path / "x.safetensors")
    with opened(tmp_path, "x.safetensors") as other:
        assert {name: row.shape for name, row in header(other, "x").items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }


@pytest.mark.parametrize(
    "params",
    [{"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, {1: torch.ones(1), "1": torch.ones(1)}],
)
def test_two_leaves_of_a_stage_with_one_name_are_refused(tmp_path: Path, params: Any):
    """Not saved, not streamed, and not received: both would get the same tensor."""
    error = pytest.raises(CheckpointError, match=r"two leaves are called 'first\..*rename a key")
    with error:
        fpipe.save(tmp_path / "c", two(), params=[params, params])
    with error:
        list(fpipe.stream(two(), [params, params]))
    with error:
        fpipe.receive(two(), [("first.a.b", torch.ones(1))], like=[params, params])
    state = [{"w": params} for _ in range(2)]
    with pytest.raises(CheckpointError, match=r"two tensors are called 'state/first\.w"):
        fpipe.save(tmp_path / "c", two(), params=[{"w": torch.ones(1)}] * 2, state=state)


def deep(levels: int) -> list[Any]:
    node: list[Any] = ["none"]
    for _ in range(levels):
        node = ["list", [node]]
    return node


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["trees"].update(note=deep(400)),
        lambda rows: rows["stages"].update(first=deep(400)),
        lambda rows: rows.update(slots=3),
        lambda rows: rows["slots"]["params"].pop("first.w"),  # it was None
        lambda rows: rows["slots"]["params"].update({"first.w": ["leaf", "params/last.w"]}),
        lambda rows: rows["slots"].update(params=3),
        lambda rows: rows["slots"]["params"].update({"first.w": None}),
        lambda rows: rows["trees"].update(params=5),
        lambda rows: rows["trees"].update(note=["value", "\ud800"]),
        lambda rows: rows["trees"].update(params=["device", "no such"]),
    ],
)
def test_hostile_manifests_with_the_right_hash(saved: Path, change: Any):
    raw = (saved / "manifest.json").read_bytes()
    rows = json.loads(raw)["manifest"]
    change(rows)
    text = json.dumps(rows).encode()
    digest = sha256(text).hexdigest().encode()
    (saved / "manifest.json").write_bytes(
        b'{"sha256": "' + digest + b'",\n"manifest": ' + text + b"}\n"
    )
    for like in (None, weights()):
        with pytest.raises(CheckpointError, match=r"load another checkpoint|save it again"):
            fpipe.load(saved, two(), "params", "state", like=like)
