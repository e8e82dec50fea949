# SPDX-License-Identifier: Apache-2.0
"""Lines: orders of a V that leave the last rank no wait which the memory does not force on it.

The frontier of time and memory is that of Qi et al., "Pipeline Parallelism with Controllable Memory", 2024
(arXiv:2405.15362). At unit cost a pass that goes down the ranks without a wait is a line: it runs on rank r at slot
2x + r. One that goes up runs at slot 2x + 2p - 1 - r. Lines whose x differ never share a slot, and neither do a line
down and a line up. So the schedule is two words, of the lines down and of those up, where x counts letters: on the last
rank, which runs a letter down and one up in turn. 4 ranks that hold 4 chunks, small letters for their second chunk:

    down   F F . . i W F i W F ...      rank 0   F . F . . . . f i f w . F . i I w W F f i I w W F f i I ...
    up     f f . . I W f I W f ...      rank 3   . . . F f F f . . . . i I w W F f i I w W F f i I w W F f ...

The backward of a microbatch comes p letters after its forward, or later. A rank's memory holds as many chunks as the
letters F less the letters W that have passed it. So the words begin with F as often as the memory allows, half of it
each, and wait until the first backward can come, after p letters. Then I, W and F take turns, so that no memory is
empty, until the last forward; the last backward comes p letters later. An odd chunk belongs to the word down, and the
last forward of the word up then runs without waiting for a W: the rank has run one W between two letters. W runs where
there is time, so that words only need F and I.

Ranks idle for as long as in the formula of ``v_family``, the least, while they hold no more than about 3p / 2 chunks.
With more, the first ranks would have to begin more microbatches than the last one.
"""

from __future__ import annotations

from typing import NamedTuple


class _Letters(NamedTuple):
    """Where the letters of a microbatch stand in the words."""

    first: int  #: F of the first chunk, which goes down
    second: int  #: F of the second chunk, which goes up
    second_back: int  #: its I, which goes down
    first_back: int


def line_orders(ranks: int, microbatches: int, chunks: int) -> list[list[tuple[int, int]]]:
    """By rank, the order of (pass, microbatch) within a memory of so many chunks, at least 2; pass s is the F of
    stage s, and pass ``2 * ranks + s`` is its I.

    >>> line_orders(2, 2, 4)[1]
    [(1, 0), (2, 0), (1, 1), (2, 1), (6, 0), (5, 0), (6, 1), (5, 1)]
    """
    stages = 2 * ranks
    words = _words(ranks, microbatches, chunks)
    orders = []
    for down in range(ranks):
        up = stages - 1 - down
        row = []
        for microbatch, letters in enumerate(words):
            row.append((2 * letters.first + down, (down, microbatch)))
            row.append((2 * letters.second + up, (up, microbatch)))
            row.append((2 * letters.second_back + down, (stages + up, microbatch)))
            row.append((2 * letters.first_back + up, (stages + down, microbatch)))
        orders.append([one for _, one in sorted(row)])
    return orders


def _words(ranks: int, microbatches: int, chunks: int) -> list[_Letters]:
    """The letters of all microbatches."""
    above, below = min(microbatches, chunks // 2), min(microbatches, (chunks + 1) // 2)
    last = ranks + 3 * (microbatches - below) - (chunks % 2 == 0)  #: of the last forward
    words, second_back, first_back = [], -1, -1
    for k in range(microbatches):
        first = k if k < below else ranks + 2 + 3 * (k - below)
        second = k if k < above else min(last, ranks + 2 + 3 * (k - above))
        turn = ranks + 3 * k
        second_back = max(second + ranks, second_back + 1, turn if turn <= last else last + 1)
        first_back = max(second_back, first_back + 1, turn if turn < last else last + 1)
        words.append(_Letters(first, second, second_back, first_back))
    return words
