# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not depend on schedule, ranks, cut or copies, and whole weights as a stream.

A checkpoint is a folder of safetensors files and a manifest, which is written last. Leaves have
names of the model, not of a layout (``leaf_names``). Nothing is pickled. This package must not know
how a pipeline runs.
"""

from ._processes import (
    folder_of as folder_of,
    folders_of as folders_of,
    groups_of as groups_of,
    is_first as is_first,
    wait_for_writers as wait_for_writers,
)
from .hub import export_model as export_model, model_files as model_files
from .manifest import (
    Leaf as Leaf,
    Manifest as Manifest,
    discard as discard,
    is_complete as is_complete,
)
from .reading import load as load
from .receiving import receive as receive
from .streaming import stream as stream
from .writing import Saving as Saving, save as save
