"""``run`` and ``outcomes``: a function of a group, played on fake ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GroupError, LaunchError, PeerError, StalledError
from .fake import FakeGroup, Sky
from .orders import Order
from .world import Killed, World

_ORDERS = ("buffered", "lockstep")


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: what it returned, or what it raised (as the ``nth`` to fail), or that it was ordered to die."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    killed: bool = False
    nth: int = -1


def run(
    fn: Callable[[FakeGroup], Any],
    ranks: int,
    *,
    order: str = "buffered",
    seed: int = 0,
    faults: Sequence[Order] = (),
    timeout: float = 60.0,
) -> list[Any]:
    """Play ``fn(group)`` on fake ranks in this process; what each returned, by rank.

    One rank runs at a time, and who is next is drawn from ``seed``: the same seed plays the same run. The first rank
    that raises ends the run with its error. ``order="lockstep"`` makes every send block until it is received.
    ``timeout`` is in the world's own seconds, which take no time.

    >>> def ring(group):
    ...     import torch; from fpipe.specs import Spec
    ...     spec = (Spec((), (), torch.int64),)
    ...     came = group.recv(spec, (group.rank - 1) % group.size, group.rank)
    ...     group.send((torch.tensor(group.rank),), group.rank, (group.rank + 1) % group.size)
    ...     return came.wait()[0].item()
    >>> run(ring, ranks=4), run(ring, ranks=4, order="lockstep", seed=3)
    ([3, 0, 1, 2], [3, 0, 1, 2])
    """
    ended = outcomes(fn, ranks, order=order, seed=seed, faults=faults, timeout=timeout)
    failed = sorted((outcome for outcome in ended if outcome.error is not None), key=_cause_first)
    for outcome in failed[:1]:
        assert outcome.error is not None
        outcome.error.add_note(f"on fake rank {outcome.rank} of {ranks}, order={order!r}, seed={seed}")
        raise outcome.error
    dead = [outcome.rank for outcome in ended if outcome.killed]
    if dead:
        raise LaunchError(f"ranks {dead} were ordered to die, and the others never missed them")
    return [outcome.value for outcome in ended]


def _cause_first(outcome: Outcome) -> tuple[bool, int]:
    """A rank that only missed another one is a consequence; among the rest the earliest counts."""
    return isinstance(outcome.error, (PeerError, StalledError)), outcome.nth


def outcomes(
    fn: Callable[[FakeGroup], Any],
    ranks: int,
    *,
    order: str = "buffered",
    seed: int = 0,
    faults: Sequence[Order] = (),
    timeout: float = 60.0,
) -> list[Outcome]:
    """The same, but every rank plays to its end, and how each ended comes back, by rank.

    >>> from fpipe.testing import Kill
    >>> [type(outcome.error).__name__ for outcome in outcomes(lambda group: group.barrier(), 2, faults=[Kill(1, 0)])]
    ['PeerError', 'NoneType']
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise GroupError(f"ranks={ranks!r}; give a whole number of ranks, 1 at least")
    if order not in _ORDERS:
        raise GroupError(f"order={order!r}; there are {' and '.join(_ORDERS)}")
    world = World(ranks, seed, timeout)
    sky = Sky(world, order, faults)
    values: list[Any] = [None] * ranks

    def part(rank: int) -> Callable[[], None]:
        def act() -> None:
            values[rank] = fn(FakeGroup(sky, rank))

        return act

    world.play([part(rank) for rank in range(ranks)])
    return [
        Outcome(
            seat.rank,
            values[seat.rank],
            None if isinstance(seat.error, Killed) else seat.error,
            isinstance(seat.error, Killed),
            world.failures.index(seat.rank) if seat.error is not None else -1,
        )
        for seat in world.seats
    ]
