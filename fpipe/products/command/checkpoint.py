# SPDX-License-Identifier: Apache-2.0
"""``fpipe checkpoint``: show, verify and convert checkpoints, without a pipeline and without
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...actions import progress
from ...errors import CheckpointError
from ...saving import Leaf, Manifest, export_model, import_model, is_complete
from .options import INVALID, Count, report_error

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PATH = click.argument("path", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """Show, verify or convert checkpoints of fpipe.save."""


@checkpoint.command()
@PATH
@click.option("--leaves", is_flag=True, help="List every tensor.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print names, dtypes, shapes and bytes as JSON."
)
def show(path: Path, leaves: bool, as_json: bool) -> None:
    """Print what a checkpoint holds; no tensor is read.

    \b
    fpipe checkpoint show runs/a/step-000000100
    """
    manifest = Manifest.read(path)
    if as_json:
        rows = {
            key: {"dtype": leaf.dtype, "shape": leaf.shape, "bytes": leaf.bytes}
            for key, leaf in _sorted(manifest)
        }
        click.echo(
            json.dumps(
                {"fpipe": manifest.fpipe, "trees": list(manifest.trees), "leaves": rows}, indent=2
            )
        )
        return
    click.echo(
        f"{path}: {len(manifest.leaves)} tensors, {_size(manifest.bytes)}, {len(manifest.files)} "
        "files, "
        f"written by fpipe {manifest.fpipe}"
    )
    for name, node in manifest.trees.items():
        below = [
            leaf
            for key, leaf in manifest.leaves.items()
            if key == name or key.startswith((f"{name}.", f"{name}/"))
        ]
        value = (
            repr(node[1])
            if node[0] == "value"
            else f"{len(below)} tensors, {_size(sum(r.bytes for r in below))}"
        )
        click.echo(f"  {name}: {value}")
    for key, leaf in _sorted(manifest) if leaves else ():
        click.echo(f"    {key}  {leaf}")


@checkpoint.command()
@PATH
def verify(path: Path) -> int:
    """Read every byte of a checkpoint and compare it with the hashes; the exit status is 1 if
    something differs.
    """
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return report_error(str(error), INVALID)
    with progress(f"verifying {path}") as track:
        faults = list(manifest.faults(path, track))
    for fault in faults:
        report_error(fault, INVALID)
    if not faults:
        click.echo(f"{path}: good: {len(manifest.leaves)} tensors, {_size(manifest.bytes)}")
    return INVALID if faults else 0


@checkpoint.command()
@PATH
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--tree",
    metavar="NAME",
    default="params",
    help="What becomes a model: params, or an average of them.",
)
@click.option(
    "--shard",
    type=Count(),
    default=5 << 30,
    help="Bytes of a file.",
)
def convert(path: Path, out: Path, tree: str, shard: int) -> None:
    """Convert a checkpoint to the layout of Hugging Face (safetensors files with an index), or
    back.

    A checkpoint of fpipe becomes a model, without its configuration; safetensors files become a
    checkpoint with params alone. Names of tensors stay, except that those of single experts are
    joined.

    \b
    fpipe checkpoint convert runs/a/step-000000100 model/
    fpipe checkpoint convert model/ checkpoint/
    """
    model = is_complete(path)
    with progress(f"writing {out}") as track:
        if model:
            export_model(path, out, tree, shard, track)
        else:
            import_model(path, out, shard, track)
    click.echo(
        f"wrote {out}"
        + ("; from_pretrained needs the config.json of the model there too" if model else "")
    )


def _sorted(manifest: Manifest) -> list[tuple[str, Leaf]]:
    return sorted(manifest.leaves.items())


def _size(count: float) -> str:
    """Bytes for people.

    >>> _size(10), _size(3 << 19)
    ('10 B', '1.5 MiB')
    """
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} B"
