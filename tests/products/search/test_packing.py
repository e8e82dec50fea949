"""Packing of sequences into microbatches that cost alike."""

from __future__ import annotations

import itertools
import random

import pytest

import fpipe

QUADRATIC = lambda n: n + n * n / 16


def dearest(packed: list[list[int]], lengths: list[int]) -> float:
    return max(sum(QUADRATIC(lengths[i]) for i in members) for members in packed)


@pytest.mark.parametrize("seed", range(30))
def test_the_dearest_microbatch_is_close_to_that_of_brute_force(seed: int):
    draw = random.Random(seed)
    count = draw.randint(2, 3)
    lengths = [draw.randint(1, 40) for _ in range(draw.randint(count, 8))]
    packed = fpipe.pack(lengths, microbatches=count, cost=QUADRATIC)
    assert sorted(itertools.chain(*packed)) == list(range(len(lengths))) and all(packed)
    every = itertools.product(range(count), repeat=len(lengths))
    best = min(
        dearest([[i for i, m in enumerate(homes) if m == n] for n in range(count)], lengths)
        for homes in every
        if len(set(homes)) == count
    )
    assert best <= dearest(packed, lengths) <= 1.1 * best


def test_many_sequences_cost_nearly_the_same():
    draw = random.Random(0)
    lengths = [max(1, int(draw.lognormvariate(6, 1))) for _ in range(400)]
    packed = fpipe.pack(lengths, microbatches=16, cost=QUADRATIC)
    mean = sum(map(QUADRATIC, lengths)) / 16
    assert dearest(packed, lengths) <= max(1.001 * mean, QUADRATIC(max(lengths)))


def test_every_microbatch_has_a_sequence():
    assert fpipe.pack([5, 5, 0, 0], microbatches=4) == [[0], [1], [2], [3]]


def test_mistakes_are_named():
    with pytest.raises(fpipe.errors.BatchError, match="2 sequences cannot fill microbatches=3"):
        fpipe.pack([1, 2], microbatches=3)
    with pytest.raises(fpipe.errors.BatchError, match=r"cost\(7\) is -1"):
        fpipe.pack([7, 2], microbatches=2, cost=lambda n: -1.0)
