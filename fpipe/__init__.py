# SPDX-License-Identifier: Apache-2.0
"""fpipe: pipeline parallelism as a function, and its gradient as a transform of it.

This is the public face: a table of names, and nothing else. A name loads its module when it is first used, so that
``import fpipe`` takes milliseconds and schedules can be made, checked and drawn where torch is not even installed.

>>> import fpipe
>>> fpipe.Schedule.parse("[0F0, 0B0]").ranks
1
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

#: module -> the public names that it brings, parted by blanks. The block below tells type checkers the same.
_TABLE = {
    "collectives.local": "local",
    "collectives.setup": "init",
    "command.launch": "launch",
    "errors": "ActionError BatchError DeadlockError FpipeError GroupError LaunchError MismatchError"
    " PeerError ScheduleError StageError StalledError TraceError TransformError"
    " UnsupportedError WeaveError",
    "generators": "make_schedule register_schedule schedule_names",
    "generators.balancing": "balance",
    "interop.modules": "from_module to_module",
    "plans.weaving.segments": "segment",
    "programs.stage_programs": "Programs",
    "programs.tracing": "trace",
    "running.debugging": "debug",
    "running.derived.forward_mode": "hvp jvp",
    "running.derived.per_example": "per_example",
    "running.microbatches": "Microbatches",
    "running.padding": "pad",
    "running.pipeline": "Pipeline grad pipeline value_and_grad vjp weighted",
    "running.profile.profiling": "measure_costs profile",
    "schedule": "Action Fused Placement Schedule",
    "schedules.costs": "Costs",
    "schedules.timeline": "Timeline",
    "stage": "Stage remat",
    "transforms": "Transform accumulate adamw add_noise apply_updates cast chain clip_by_global_norm"
    " clip_by_value dynamic_loss_scale ema from_torch global_norm identity lion masked"
    " mean_over muon optimistic partition scale scale_by_schedule sgd skip_nonfinite"
    " sum_tied weight_decay",
}
#: public modules and packages, as in ``fpipe.errors``: name -> where it is
_MODULES = {
    "devices": "devices",
    "errors": "errors",
    "interop": "interop",
    "ops": "collectives.ops",
    "testing": "testing",
}

_FACE = {name: module for module, names in _TABLE.items() for name in names.split()}

if TYPE_CHECKING:
    from . import devices as devices
    from . import errors as errors
    from . import interop as interop
    from . import testing as testing
    from .collectives import ops as ops
    from .collectives.local import local as local
    from .collectives.setup import init as init
    from .command.launch import launch as launch
    from .errors import ActionError as ActionError
    from .errors import BatchError as BatchError
    from .errors import DeadlockError as DeadlockError
    from .errors import FpipeError as FpipeError
    from .errors import GroupError as GroupError
    from .errors import LaunchError as LaunchError
    from .errors import MismatchError as MismatchError
    from .errors import PeerError as PeerError
    from .errors import ScheduleError as ScheduleError
    from .errors import StageError as StageError
    from .errors import StalledError as StalledError
    from .errors import TraceError as TraceError
    from .errors import TransformError as TransformError
    from .errors import UnsupportedError as UnsupportedError
    from .errors import WeaveError as WeaveError
    from .generators import make_schedule as make_schedule
    from .generators import register_schedule as register_schedule
    from .generators import schedule_names as schedule_names
    from .generators.balancing import balance as balance
    from .interop.modules import from_module as from_module
    from .interop.modules import to_module as to_module
    from .plans.weaving.segments import segment as segment
    from .programs.stage_programs import Programs as Programs
    from .programs.tracing import trace as trace
    from .running.debugging import debug as debug
    from .running.derived.forward_mode import hvp as hvp
    from .running.derived.forward_mode import jvp as jvp
    from .running.derived.per_example import per_example as per_example
    from .running.microbatches import Microbatches as Microbatches
    from .running.padding import pad as pad
    from .running.pipeline import Pipeline as Pipeline
    from .running.pipeline import grad as grad
    from .running.pipeline import pipeline as pipeline
    from .running.pipeline import value_and_grad as value_and_grad
    from .running.pipeline import vjp as vjp
    from .running.pipeline import weighted as weighted
    from .running.profile.profiling import measure_costs as measure_costs
    from .running.profile.profiling import profile as profile
    from .schedule import Action as Action
    from .schedule import Fused as Fused
    from .schedule import Placement as Placement
    from .schedule import Schedule as Schedule
    from .schedules.costs import Costs as Costs
    from .schedules.timeline import Timeline as Timeline
    from .stage import Stage as Stage
    from .stage import remat as remat
    from .transforms import Transform as Transform
    from .transforms import accumulate as accumulate
    from .transforms import adamw as adamw
    from .transforms import add_noise as add_noise
    from .transforms import apply_updates as apply_updates
    from .transforms import cast as cast
    from .transforms import chain as chain
    from .transforms import clip_by_global_norm as clip_by_global_norm
    from .transforms import clip_by_value as clip_by_value
    from .transforms import dynamic_loss_scale as dynamic_loss_scale
    from .transforms import ema as ema
    from .transforms import from_torch as from_torch
    from .transforms import global_norm as global_norm
    from .transforms import identity as identity
    from .transforms import lion as lion
    from .transforms import masked as masked
    from .transforms import mean_over as mean_over
    from .transforms import muon as muon
    from .transforms import optimistic as optimistic
    from .transforms import partition as partition
    from .transforms import scale as scale
    from .transforms import scale_by_schedule as scale_by_schedule
    from .transforms import sgd as sgd
    from .transforms import skip_nonfinite as skip_nonfinite
    from .transforms import sum_tied as sum_tied
    from .transforms import weight_decay as weight_decay
else:
    __all__ = sorted({*_FACE, *_MODULES})


def __getattr__(name: str) -> object:
    if name in _FACE:
        value = getattr(_import_module(f"{__name__}.{_FACE[name]}"), name)
    elif name in _MODULES:
        value = _import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'fpipe' has no attribute {name!r}; dir(fpipe) lists what it has")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE, *_MODULES})
