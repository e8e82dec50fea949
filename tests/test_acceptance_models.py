"""Issue-sized promises about real models: tiny decoders in 4 and 8 stages under every schedule, here and over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import fpipe
from decoders import ACCEPTANCE, decoder, distance, tokens, unsplit
from fpipe.interop import huggingface
from schedule_table import TABLE, Case

MICROBATCHES = 4
NAMED = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@cache
def split(family: str, stages: int) -> tuple[Any, Any, torch.Tensor, dict[str, torch.Tensor]]:
    """Stages and parameters of a family's model with something frozen, and the unsplit model's loss and gradients.

    Eight stages are seven with a layer each, and the head.
    """
    model = decoder(family, layers=4 if stages == 4 else 7)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_("layers.1" not in name and "h.1" not in name and index % 5 != 3)
    made, params = huggingface.stages(model, stages)
    return made, params, *unsplit(model, MICROBATCHES, tokens(MICROBATCHES, 5))


def check(family: str, case: Case, group: Any) -> bool:
    """Whether loss and gradients of one run, as far as they are here, are the unsplit model's own to 1e-6."""
    stages, params, want, reference = split(family, case.stages)
    pipe = fpipe.pipeline(stages, case.make(), loss=huggingface.causal_loss, microbatches=MICROBATCHES, group=group)
    ids = tokens(MICROBATCHES, 5)
    loss, grads = fpipe.value_and_grad(pipe)(pipe.place(params), ids, ids)
    for own, all_own in zip(grads, params, strict=True):
        for name in all_own if own is not None else ():
            assert (own[name] is None) == (name not in reference), f"{name} is frozen on one side"
    return abs(float(loss / want) - 1) < 1e-6 and distance(grads, reference) < 1e-6


def schedules(stages: int) -> Iterator[Case]:
    """Every schedule that can run so many stages on 4 ranks or, in a V, on 2."""
    for entry in TABLE:
        for ranks in (4, 2):
            if stages // ranks in entry.per_rank and (ranks == 4 or stages == 4):
                yield Case(entry.name, ranks, MICROBATCHES, stages)


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("family", ACCEPTANCE)
def test_every_schedule_equals_unsplit(family: str, stages: int):
    cases = list(schedules(stages))
    assert {case.name for case in cases} >= set(NAMED if stages == 4 else NAMED[2:])
    wrong = [str(case) for case in cases if not check(family, case, fpipe.local(case.ranks))]
    assert not wrong


def _over_gloo(families: tuple[str, ...]) -> list[str]:
    group = fpipe.init()
    wrong = []
    for family in families:
        for name in NAMED[0 if family in ("llama", "gpt2") else 2 :]:  # four stages of two families, eight of all
            stages = 4 if name in ("GPipe", "1F1B") else 8
            if not check(family, Case(name, 4, MICROBATCHES, stages), group):
                wrong.append(f"{family} under {name}")
    return wrong


@pytest.mark.timeout(240)
def test_over_four_processes():
    assert fpipe.launch(_over_gloo, ACCEPTANCE, ranks=4, timeout=200) == [[]] * 4
