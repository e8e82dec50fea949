# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not depend on schedule, ranks, cut or copies, and whole weights as a stream.

A checkpoint is a folder of safetensors files and a manifest, which is written last. Leaves have
names of the model, not of a layout (``leaf_names``). Nothing is pickled. This package must not know
how a pipeline runs.
"""

from ._processes import folder_of as folder_of
from ._processes import folders_of as folders_of
from ._processes import groups_of as groups_of
from ._processes import is_first as is_first
from ._processes import wait_for_writers as wait_for_writers
from .hub import export_model as export_model
from .hub import model_files as model_files
from .manifest import Leaf as Leaf
from .manifest import Manifest as Manifest
from .manifest import discard as discard
from .manifest import is_complete as is_complete
from .reading import load as load
from .receiving import receive as receive
from .streaming import stream as stream
from .writing import Saving as Saving
from .writing import save as save
