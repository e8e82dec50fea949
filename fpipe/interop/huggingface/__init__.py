# SPDX-License-Identifier: Apache-2.0
"""Causal models of the transformers package as pure stages.

``splitting.stages`` runs the model on a few tokens (``trial``), notes which values each of its
layers depends on (``recording``), and finds which of them each stage needs (``crossing``). A stage
then runs the model's own forward, in which the layers of other stages return the values that the
stage received (``model_part``). This package does not import transformers, and must not know any
family of models by name.
"""

from .splitting import stages
from .training import causal_loss, causal_loss_sum, load, trainer

__all__ = ["causal_loss", "causal_loss_sum", "load", "stages", "trainer"]
