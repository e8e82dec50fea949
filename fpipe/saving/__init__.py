# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not depend on schedule, ranks, cut or copies, and whole weights as a stream.

A checkpoint is a folder of safetensors files and a manifest, which is written last. Leaves have
names of the model, not of a layout (``keys``). Nothing is pickled. This package must not know how a
pipeline runs.
"""

from .hub import export_model, model_files

__all__ = ["export_model", "model_files"]
