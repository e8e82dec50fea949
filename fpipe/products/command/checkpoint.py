# SPDX-License-Identifier: Apache-2.0
"""``fpipe checkpoint``: show, verify and convert checkpoints, without a pipeline and without
transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import click

from ...errors import CheckpointError
from ...saving import Leaf, Manifest, export_model
from ..pictures.labels import size_text
from .options import INVALID, json_option, option, print_json, report_error

PATH = click.argument("path", metavar="DIR", type=click.Path(path_type=Path))


@click.group()
def checkpoint() -> None:
    """Show, verify or convert checkpoints of fpipe.save."""


@checkpoint.command()
@PATH
@option("--leaves", "List every tensor.")
@json_option
def show(path: Path, leaves: bool, as_json: bool) -> None:
    """Print what a checkpoint holds; no tensor is read.

    \b
    fpipe checkpoint show runs/a/step-000000100
    """
    manifest = Manifest.read(path)
    by_name = dict(sorted(manifest.leaves.items()))
    if as_json:
        rows = {
            name: {"dtype": leaf.dtype, "shape": leaf.shape, "bytes": leaf.bytes}
            for name, leaf in by_name.items()
        }
        print_json({"fpipe": manifest.fpipe, "trees": list(manifest.trees), "leaves": rows})
        return
    click.echo(
        f"{path}: {_counted(by_name.values())}, {len(manifest.files)} files, "
        f"written by fpipe {manifest.fpipe}"
    )
    for name, node in manifest.trees.items():
        below = (f"{name}.", f"{name}/")
        held = [leaf for key, leaf in by_name.items() if key == name or key.startswith(below)]
        click.echo(f"  {name}: {repr(node[1]) if node[0] == 'value' else _counted(held)}")
    if leaves:
        for name, leaf in by_name.items():
            click.echo(f"    {name}  {leaf}")


def _counted(leaves: Collection[Leaf]) -> str:
    return f"{len(leaves)} tensors, {size_text(sum(leaf.bytes for leaf in leaves))}"


@checkpoint.command()
@PATH
def verify(path: Path) -> int:
    """Compare every byte of a checkpoint with its hashes.

    The exit status is 1 if something differs.
    """
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return report_error(str(error), INVALID)
    faults = list(manifest.faults(path))
    for fault in faults:
        report_error(fault, INVALID)
    if not faults:
        click.echo(f"{path}: good: {_counted(manifest.leaves.values())}")
    return INVALID if faults else 0


@checkpoint.command()
@PATH
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path))
@option("--tree NAME", "What becomes a model: params, or an average of them.", "params")
@option("--shard N", "Bytes of a file.", 5 << 30)
def convert(path: Path, out: Path, tree: str, shard: int) -> None:
    """Convert a checkpoint for Hugging Face.

    DIR gets safetensors files with an index, without the configuration of the model.

    \b
    fpipe checkpoint convert runs/a/step-000000100 model/
    """
    export_model(path, out, tree, shard)
    click.echo(f"wrote {out}; from_pretrained needs the config.json of the model there too")
