"""DualPipeV: a forward and a backward run as one, so that each hides the other's communication.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), and the DualPipe repository published with it;
the V is DualPipe cut in half.

The model goes down the ranks and up again; capitals are a rank's first chunk, small letters its second. ``X`` is F and
b as one, ``Y`` is f and B as one. Three ranks, seven microbatches, phase by phase:

    rank 0   FFFF  Ff      iWfiWf  XYXY      bYbY  bI      WIWI  W
    rank 1   FF    FfFf    iWf     XYXYXY    bY    bBiI    WI    WW
    rank 2         FfFfFf          FbYXYXYXY       bBbIiI        WWW

The Ws leave first in, first out. All of this is there when there are two microbatches a rank; with fewer, it is drawn
for that many and the first ones are left out (with the last ones left out it would be slower), and a fused action that
loses a half becomes the other half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..actions import Action, Placement, Row
from ..schedule import Schedule
from ._words import Tape, deal, fused, keep, oldest, queueing, tape


def make_dual_pipe_v(ranks: int, microbatches: int, stages: int) -> Schedule:
    """DualPipeV; two stages a rank.

    >>> print(make_dual_pipe_v(1, 3, 2))
    [0F0, 1F0, 0F1, 1B0, (1F1;0B0)OVERLAP_F_B, (0F2;1B1)OVERLAP_F_B, (1F2;0B1)OVERLAP_F_B, 1B2, 0I2, 0W2]
    """
    drawn = max(2 * ranks, microbatches)
    rows = tuple(_row(_word(ranks, r, drawn), r, stages - 1 - r, range(drawn)) for r in range(ranks))
    if drawn > microbatches:
        rows = keep(rows, range(drawn - microbatches, drawn))
    return Schedule(rows, Placement.v(ranks), microbatches, "DualPipeV")


def _word(p: int, r: int, m: int) -> str:
    """The eight phases of rank ``r`` of ``p``, for ``m`` microbatches."""
    gap, near = p - r - 1, r + 1
    main = "XY" * (m - 2 * p + near)
    if gap == 0:
        main = "Fb" + main[1:]  # at the bottom of the V fusing the first pair would only make it wait
    turn = "bB" * near
    turn = turn[:near] + turn[near:].replace("b", "i").replace("B", "I")
    return "F" * (2 * gap) + "Ff" * near + "iWf" * gap + main + "bY" * gap + turn + "WI" * gap + "W" * near


def _row(word: str, first: int, second: int, batches: range) -> Row:
    queue: deque[Action] = deque()
    f0, b0, i0 = _chunk(first, batches, queue)
    f1, b1, i1 = _chunk(second, batches, queue)
    hand: dict[str, Tape] = {"F": f0, "B": b0, "I": i0, "f": f1, "b": b1, "i": i1, "W": oldest(queue)}
    return deal(word, hand | {"X": fused(f0, b1), "Y": fused(f1, b0)})


def _chunk(stage: int, batches: range, queue: deque[Action]) -> tuple[Iterator[Action], ...]:
    """The tapes of a stage's F, B and I; I goes on with the microbatch at which B stopped."""
    back = iter(batches)
    return tape(stage, "F", batches), tape(stage, "B", back), queueing(tape(stage, "I", back), queue)
