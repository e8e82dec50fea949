# SPDX-License-Identifier: Apache-2.0
"""``run`` and ``outcomes``: run a function of a group on fake ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from ..collectives.local import check_ranks
from ..errors import GroupError, LaunchError, PeerError, StalledError
from .fake import FakeGroup, Network
from .faults import Fault
from .world import Outcome, World

T = TypeVar("T")
Order: TypeAlias = Literal["buffered", "lockstep"]


def run(
    fn: Callable[[FakeGroup], T],
    ranks: int,
    *,
    order: Order = "buffered",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    timeout: float = 60.0,
) -> list[T]:
    """Run ``fn(group)`` on fake ranks in this process; the results by rank.

    One rank runs at a time: the same seed gives the same run.

    Args:
        fn: a function of the group of its rank.
        ranks: how many ranks there are.
        order: ``"buffered"``: messages arrive later, each channel in order. ``"lockstep"``: every
            send blocks until its receive is posted.
        seed: draws which rank runs next.
        faults: what goes wrong: ``Kill``, ``Drop``, ``Delay``, ``Refuse``.
        timeout: of a wait, in seconds of a simulated clock, which take no time.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        LaunchError: if a rank was killed.
        GroupError: if one of the faults did not occur. Besides, the first error of a rank is
        raised.

    >>> def ring(group):
    ...     import torch; from fpipe.tree import Spec
    ...     spec = (Spec((), (), torch.int64),)
    ...     came = group.recv(spec, (group.rank - 1) % group.size, group.rank)
    ...     group.send((torch.tensor(group.rank),), group.rank, (group.rank + 1) % group.size)
    ...     return came.wait()[0].item()
    >>> run(ring, ranks=4), run(ring, ranks=4, order="lockstep", seed=3)
    ([3, 0, 1, 2], [3, 0, 1, 2])
    """
    if not callable(fn):
        raise GroupError(f"run takes a function of the group of a rank, not {fn!r}")
    ends = outcomes(fn, ranks, order=order, seed=seed, faults=faults, timeout=timeout)
    failure = _first_failure(ends)
    if failure is not None and failure.error is not None:
        place = f"on fake rank {failure.rank} of {ranks}, order={order!r}, seed={seed}"
        failure.error.add_note(place)
        raise failure.error
    dead = [outcome.rank for outcome in ends if outcome.killed]
    if dead:
        raise LaunchError(f"ranks {dead} were killed by faults, and no other rank noticed")
    return [outcome.value for outcome in ends]


def _first_failure(ends: list[Outcome]) -> Outcome | None:
    """The earliest error. Errors about other ranks are consequences, and count as later ones."""
    return min(
        (end for end in ends if end.error is not None),
        key=lambda end: (isinstance(end.error, (PeerError, StalledError)), end.nth),
        default=None,
    )


def outcomes(
    fn: Callable[[FakeGroup], Any],
    ranks: int,
    *,
    order: Order = "buffered",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    timeout: float = 60.0,
) -> list[Outcome]:
    """As :func:`run`, but every rank runs to its end; how each ended, by rank.

    Args:
        fn, ranks, order, seed, faults, timeout: as for ``run``.

    Returns:
        One ``Outcome`` for each rank.

    Raises:
        GroupError: if one of the faults did not occur.

    >>> from fpipe.testing import Kill
    >>> [type(outcome.error).__name__ for outcome in outcomes(lambda group: group.barrier(), 2,
    ...     faults=[Kill(1, 0)])]
    ['PeerError', 'NoneType']
    """
    check_ranks("ranks", ranks)
    if order not in get_args(Order):
        raise GroupError(f"order={order!r}; the orders are {' and '.join(get_args(Order))}")
    world = World(ranks, seed, timeout)
    network = Network(world, faults, lockstep=order == "lockstep")
    world.play([partial(fn, FakeGroup(network, rank)) for rank in range(ranks)])
    ends = [state.outcome for state in world.ranks if state.outcome is not None]
    unused = network.unused()
    if unused:
        failure = _first_failure(ends)
        raise GroupError(unused) from failure and failure.error
    return ends
