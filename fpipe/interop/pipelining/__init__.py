# SPDX-License-Identifier: Apache-2.0
"""The classes of ``torch.distributed.pipelining``, running on fpipe: change one import of a script.

``from fpipe.interop.pipelining import PipelineStage, Schedule1F1B``. Stages are modules, gradients
are added to ``.grad``, and ``step`` and ``eval`` take the arguments of torch's own.
``get_schedule_class`` knows every name of fpipe's catalogue too. ``docs/howto/pipelining.md`` lists
what is left out.
"""

from torch.distributed.pipelining.microbatch import TensorChunkSpec

from .schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from .stage import PipelineStage

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "get_schedule_class",
]
