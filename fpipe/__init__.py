"""fpipe: pipeline parallelism as a function, and its gradient as a transform of it.

This is the public face: a table of names, and nothing else. A name loads its module when it is first used, so that
``import fpipe`` takes milliseconds and schedules can be made, checked and drawn where torch is not even installed.

>>> import fpipe
>>> fpipe.Schedule.parse("[0F0, 0B0]").ranks
1
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

#: module -> the public names that it brings, parted by blanks. The block below tells type checkers the same.
_TABLE = {
    "_pipeline": "Pipeline grad pipeline value_and_grad vjp weighted",
    "_launch": "launch",
    "actions": "Action Fused Placement",
    "balancing": "balance",
    "collectives.local": "local",
    "collectives.setup": "init",
    "debugging": "debug",
    "dual": "hvp jvp",
    "errors": "ActionError BatchError DeadlockError FpipeError GroupError LaunchError MismatchError PeerError"
    " ScheduleError StageError StalledError TraceError TransformError UnsupportedError WeaveError",
    "interop.modules": "from_module to_module",
    "microbatch": "Microbatches",
    "padding": "pad",
    "profiling": "measure_costs profile",
    "generators": "make_schedule register_schedule schedule_names",
    "rowwise": "per_example",
    "schedule": "Schedule",
    "simulate": "Costs",
    "segments": "segment",
    "stage": "Programs Stage remat",
    "tracing": "trace",
    "timeline": "Timeline",
    "transforms": "Transform accumulate adamw add_noise apply_updates cast chain clip_by_global_norm clip_by_value"
    " dynamic_loss_scale ema from_torch global_norm identity lion masked mean_over muon optimistic partition scale"
    " scale_by_schedule sgd skip_nonfinite sum_tied weight_decay",
}
#: modules and packages that are public by their own name, as in ``fpipe.errors``
_MODULES = "devices errors interop ops testing"

_FACE = {name: module for module, names in _TABLE.items() for name in names.split()}

if TYPE_CHECKING:
    from . import devices as devices
    from . import errors as errors
    from . import interop as interop
    from . import ops as ops
    from . import testing as testing
    from ._launch import launch as launch
    from ._pipeline import Pipeline as Pipeline
    from ._pipeline import grad as grad
    from ._pipeline import pipeline as pipeline
    from ._pipeline import value_and_grad as value_and_grad
    from ._pipeline import vjp as vjp
    from ._pipeline import weighted as weighted
    from .actions import Action as Action
    from .actions import Fused as Fused
    from .actions import Placement as Placement
    from .balancing import balance as balance
    from .collectives.local import local as local
    from .collectives.setup import init as init
    from .debugging import debug as debug
    from .dual import hvp as hvp
    from .dual import jvp as jvp
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
    from .interop.modules import from_module as from_module
    from .interop.modules import to_module as to_module
    from .microbatch import Microbatches as Microbatches
    from .padding import pad as pad
    from .profiling import measure_costs as measure_costs
    from .profiling import profile as profile
    from .rowwise import per_example as per_example
    from .schedule import Schedule as Schedule
    from .segments import segment as segment
    from .simulate import Costs as Costs
    from .stage import Programs as Programs
    from .stage import Stage as Stage
    from .stage import remat as remat
    from .timeline import Timeline as Timeline
    from .tracing import trace as trace
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
    __all__ = sorted({*_FACE, *_MODULES.split()})


def __getattr__(name: str) -> object:
    if name in _FACE:
        value = getattr(_import_module(f"{__name__}.{_FACE[name]}"), name)
    elif name in _MODULES.split():
        value = _import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module 'fpipe' has no attribute {name!r}; dir(fpipe) lists what it has")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE, *_MODULES.split()})
