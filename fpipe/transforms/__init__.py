# SPDX-License-Identifier: Apache-2.0
"""Gradient transforms: pairs of pure functions over trees with one entry per stage.

``tx = chain(...)``; ``state = tx.init(params)``;
``updates, state = tx.update(grads, state, params)``; ``params = apply_updates(params, updates)``;
or both in one pass: ``params, state = tx.step(grads, state, params)``. Trees have ``None`` for
stages on other processes and for frozen leaves. This package must not know schedules or how a
pipeline runs: it reduces over ranks through ``over=`` or a group.

>>> import torch
>>> tx = chain(clip_by_global_norm(1.0), adamw(0.1))
>>> params = [{"w": torch.ones(3)}, None]
>>> state = tx.init(params)
>>> updates, state = tx.update([{"w": torch.ones(3)}, None], state, params)
>>> apply_updates(params, updates)
[{'w': tensor([0.8990, 0.8990, 0.8990])}, None]
"""

from .combining import masked, partition
from .finite import LossScaleState as LossScaleState, dynamic_loss_scale, skip_nonfinite
from .gathering import mean_over
from .learning_rates import warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay
from .masters import master
from .norms import ClipState as ClipState, clip_by_global_norm, global_norm
from .optimizers import adamw, sgd
from .scaling import add_noise, cast, scale, scale_by_schedule
from .torch_optim import from_torch
from .transform import Transform, apply_updates, chain, identity

__all__ = [
    "Transform",
    "adamw",
    "add_noise",
    "apply_updates",
    "cast",
    "chain",
    "clip_by_global_norm",
    "dynamic_loss_scale",
    "from_torch",
    "global_norm",
    "identity",
    "masked",
    "master",
    "mean_over",
    "partition",
    "scale",
    "scale_by_schedule",
    "sgd",
    "skip_nonfinite",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]
