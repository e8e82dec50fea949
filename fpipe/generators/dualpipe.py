# SPDX-License-Identifier: Apache-2.0
"""DualPipe and DualPipeV: a forward and a backward run as one, so that the computation of each
hides the communication of the other.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), and the DualPipe repository
published with it. The V is DualPipe cut in half.

**DualPipeV.** The model goes down the ranks and up again. Capitals are the first chunk of a rank,
small letters its second. ``X`` is F and b as one, ``Y`` is f and B as one. Three ranks, seven
microbatches, phase by phase:

    rank 0   FFFF  Ff      iWfiWf  XYXY      bYbY  bI      WIWI  W
    rank 1   FF    FfFf    iWf     XYXYXY    bY    bBiI    WI    WW
    rank 2         FfFfFf          FbYXYXYXY       bBbIiI        WWW

Ws run in the order of their Is. The rows need two microbatches for each rank. For fewer, rows are
made for that many and the first microbatches are left out: without the last ones, the rows would
take longer. A fused action that loses a part becomes the other part.

**DualPipe.** Every stage is on two ranks, one for each direction, and half of the microbatches go
each way. Each half of the ranks, from its outer end inwards, runs the patterns above. Capitals are
then the direction that enters at that end. Six ranks run the patterns of three in each half:

    on rank                     0     1     2     3     4     5
    stage, microbatches down    0     1     2     3     4     5
    stage, microbatches up      5     4     3     2     1     0
    pattern above of rank       0     1     2     2     1     0
"""

from __future__ import annotations

from collections.abc import Iterator

from ..actions.action import Action, AnyAction, Placement, Row, unfused
from .patterns import Made, actions, fused, keep_microbatches
from .shapes import two_directions


def make_dual_pipe_v(ranks: int, microbatches: int, stages: int) -> Made:
    """DualPipe on a V: a rank holds its weights once.

    A forward and a backward run as one to hide messages, for half a microbatch more memory than
    1F1B.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("DualPipeV", 1, 3, 2))
    [0F0, 1F0, 0F1, 1B0, (1F1;0B0)OVERLAP_F_B, (0F2;1B1)OVERLAP_F_B, (1F2;0B1)OVERLAP_F_B, 1B2, 0I2,
    0W2]
    """
    made_for = max(2 * ranks, microbatches)
    batches = range(made_for)
    rows = [
        _row(_pattern(ranks, r, made_for), (r, batches), (stages - 1 - r, batches))
        for r in range(ranks)
    ]
    rows = keep_microbatches(rows, made_for, batches[made_for - microbatches :])
    return rows, Placement.v(ranks)


def make_dual_pipe(ranks: int, microbatches: int, stages: int) -> Made:
    """From both ends; F and B run as one to hide messages.

    Every stage is on two ranks. Of an odd count of microbatches one more goes down than up.

    >>> from fpipe import make_schedule
    >>> print(make_schedule("DualPipe", 2, 2, 2))
    [0F0, 1F1, 1B1, 0I0, 0W0]
    [0F1, 1F0, 1B0, 0I1, 0W1]
    """

    made_for = max(ranks, -(-microbatches // 2))

    def row(near: int, far: int, first: range, second: range) -> Row:
        return _row(_pattern(ranks // 2, near, made_for), (near, first), (far, second))

    return two_directions(
        "DualPipe", ranks, microbatches, row, made_for, keep_last=True, remedy="or DualPipeV"
    )


def _pattern(p: int, r: int, m: int) -> str:
    """The eight phases of rank ``r`` of ``p``, for ``m`` microbatches."""
    gap = p - r - 1
    near = r + 1
    main = "XY" * (m - 2 * p + near)
    if gap == 0:  # at the bottom of the V, fusing the first pair would only make it wait
        main = "Fb" + main[1:]
    turn = "bB" * near
    turn = turn[:near] + turn[near:].replace("b", "i").replace("B", "I")
    return (
        "F" * (2 * gap)
        + "Ff" * near
        + "iWf" * gap
        + main
        + "bY" * gap
        + turn
        + "WI" * gap
        + "W" * near
    )


def _row(pattern: str, first: tuple[int, range], second: tuple[int, range]) -> Row:
    """The row of a rank, from (stage, microbatches) of its two chunks."""
    f0, b0, i0 = _chunk(*first)
    f1, b1, i1 = _chunk(*second)
    tapes: dict[str, Iterator[AnyAction]] = {"F": f0, "B": b0, "I": i0, "f": f1, "b": b1, "i": i1}
    tapes |= {"X": fused(f0, b1), "Y": fused(f1, b0)}
    row: list[AnyAction] = []
    inputs = (part for part in unfused(row) if part.op == "I")  # read while the row grows
    tapes["W"] = (part._replace(op="W") for part in inputs)
    for letter in pattern:
        row.append(next(tapes[letter]))
    return tuple(row)


def _chunk(stage: int, batches: range) -> tuple[Iterator[Action], ...]:
    """The tapes of F, B and I of a stage. I goes on with the microbatch at which B stopped."""
    backwards = iter(batches)
    return (
        actions(stage, "F", batches),
        actions(stage, "B", backwards),
        actions(stage, "I", backwards),
    )
