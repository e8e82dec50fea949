# SPDX-License-Identifier: Apache-2.0
"""fpipe: pipeline parallelism as a function, and its gradient as a transform of it.

This module is a table of the public names. A name loads its module when it is first used:
``import fpipe`` takes milliseconds, and schedules can be built, checked and drawn without torch.

>>> import fpipe
>>> fpipe.Schedule.parse("[0F0, 0B0]").ranks
1
"""

from importlib import import_module as _import_module
from types import FunctionType as _FunctionType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

#: module -> its public names, separated by blanks. The block below is the same for type checkers.
_TABLE = {
    "collectives.local": "local",
    "collectives.setup": "adopt init",
    "products.training.elastic": "elastic",
    "products.training.epochs": "Epochs",
    "products.training.launch": "launch",
    "products.training.loop": "Loop",
    "errors": "FpipeError",
    "generators": "make_schedule register_schedule schedule_names",
    "products.search.balancing": "balance",
    "products.search.packing": "pack",
    "interop.modules": "from_module to_module",
    "programs.program": "Programs",
    "programs.trace_one": "trace",
    "programs.wrappers": "block remat",
    "passes.chunked_loss": "chunked_cross_entropy",
    "passes.elsewhere.arguments": "elsewhere",
    "engine.copies": "copies",
    "products.search.auto": "auto",
    "passes.debugging": "debug",
    "passes.derived.per_example": "per_example",
    "engine.microbatches": "Microbatches",
    "passes.padding": "pad",
    "engine.gradients": "grad value_and_grad vjp",
    "engine.pipeline": "Pipeline pipeline",
    "passes.profile.profiling": "measure_costs profile",
    "passes.weighting": "weighted",
    "saving": "load receive save stream",
    "schedule": "Action Fused Placement Schedule Slice",
    "actions.costs": "Costs",
    "actions.timeline": "Timeline",
    "products.search.solve": "Solved solve",
    "stage": "Stage",
    "transforms": "Transform adamw apply_updates cast chain clip_by_global_norm "
    "dynamic_loss_scale from_torch global_norm masked master mean_over partition scale "
    "scale_by_schedule sgd skip_nonfinite",
}
#: public modules and packages, as in ``fpipe.errors``: name -> path in the package
_MODULES = {
    "devices": "devices",
    "errors": "errors",
    "interop": "interop",
    "ops": "passes.ops",
    "testing": "testing",
    "transforms": "transforms",
}

#: public name -> its module
_NAMES = {name: module for module, names in _TABLE.items() for name in names.split()}

if TYPE_CHECKING:
    from . import (
        devices as devices,
        errors as errors,
        interop as interop,
        testing as testing,
        transforms as transforms,
    )
    from .actions.costs import Costs as Costs
    from .actions.timeline import Timeline as Timeline
    from .collectives.local import local as local
    from .collectives.setup import adopt as adopt, init as init
    from .engine.copies import copies as copies
    from .engine.gradients import grad as grad, value_and_grad as value_and_grad, vjp as vjp
    from .engine.microbatches import Microbatches as Microbatches
    from .engine.pipeline import Pipeline as Pipeline, pipeline as pipeline
    from .errors import FpipeError as FpipeError
    from .generators import (
        make_schedule as make_schedule,
        register_schedule as register_schedule,
        schedule_names as schedule_names,
    )
    from .interop.modules import from_module as from_module, to_module as to_module
    from .passes import ops as ops
    from .passes.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
    from .passes.debugging import debug as debug
    from .passes.derived.per_example import per_example as per_example
    from .passes.elsewhere.arguments import elsewhere as elsewhere
    from .passes.padding import pad as pad
    from .passes.profile.profiling import measure_costs as measure_costs, profile as profile
    from .passes.weighting import weighted as weighted
    from .products.search.auto import auto as auto
    from .products.search.balancing import balance as balance
    from .products.search.packing import pack as pack
    from .products.search.solve import Solved as Solved, solve as solve
    from .products.training.elastic import elastic as elastic
    from .products.training.epochs import Epochs as Epochs
    from .products.training.launch import launch as launch
    from .products.training.loop import Loop as Loop
    from .programs.program import Programs as Programs
    from .programs.trace_one import trace as trace
    from .programs.wrappers import block as block, remat as remat
    from .saving import load as load, receive as receive, save as save, stream as stream
    from .schedule import *
    from .stage import Stage as Stage
    from .transforms import (
        Transform as Transform,
        adamw as adamw,
        apply_updates as apply_updates,
        cast as cast,
        chain as chain,
        clip_by_global_norm as clip_by_global_norm,
        dynamic_loss_scale as dynamic_loss_scale,
        from_torch as from_torch,
        global_norm as global_norm,
        masked as masked,
        master as master,
        mean_over as mean_over,
        partition as partition,
        scale as scale,
        scale_by_schedule as scale_by_schedule,
        sgd as sgd,
        skip_nonfinite as skip_nonfinite,
    )
else:
    __all__ = sorted({*_NAMES, *_MODULES})


def __getattr__(name: str) -> object:
    if name not in _NAMES and name not in _MODULES:
        raise AttributeError(
            f"module 'fpipe' has no attribute {name!r}; dir(fpipe) lists what it has"
        )
    try:
        module = _import_module(f"{__name__}.{_NAMES.get(name) or _MODULES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "optree"):
            raise
        needs = (
            f"fpipe.{name} needs {error.name}, which is not installed: pip install "
            f"{error.name}. Without it"
        )
        what = f"{needs} schedules can be generated, checked, simulated, solved and drawn"
        raise ModuleNotFoundError(what, name=error.name) from error
    value = getattr(module, name) if name in _NAMES else module
    # in a plain call Python names the argument, so that the check is none of the files of the call
    if isinstance(value, _FunctionType) and name not in ("local", "pipeline"):
        from .errors import checked

        value = checked(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_MODULES})
