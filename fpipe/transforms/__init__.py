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

from .averaging import accumulate, ema
from .combining import masked, partition
from .finite import LossScaleState as LossScaleState
from .finite import dynamic_loss_scale, skip_nonfinite
from .gathering import mean_over, sum_tied
from .learning_rates import warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay
from .masters import master
from .newton_schulz import muon
from .norms import ClipState as ClipState
from .norms import clip_by_global_norm, clip_by_value, global_norm
from .optimism import optimistic
from .optimizers import adamw, lion, sgd
from .scaling import add_noise, cast, scale, scale_by_schedule, weight_decay
from .torch_optim import from_torch
from .transform import Transform, apply_updates, chain, identity

__all__ = [
    "Transform",
    "accumulate",
    "adamw",
    "add_noise",
    "apply_updates",
    "cast",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "dynamic_loss_scale",
    "ema",
    "from_torch",
    "global_norm",
    "identity",
    "lion",
    "masked",
    "master",
    "mean_over",
    "muon",
    "optimistic",
    "partition",
    "scale",
    "scale_by_schedule",
    "sgd",
    "skip_nonfinite",
    "sum_tied",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
    "weight_decay",
]
