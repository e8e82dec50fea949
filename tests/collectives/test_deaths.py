"""A rank that dies while others wait at the store: they notice it long before their time-out."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from carriers import OVER
from fpipe.collectives.c10d import C10dGroup
from fpipe.errors import PeerError
from fpipe.products.training import launch as launching
from sample import also

RANKS, VICTIM, SLOW, TIMEOUT = 3, 2, 1, 100.0


def _layer(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p)


def _square(y: torch.Tensor) -> torch.Tensor:
    return (y * y).mean()


def _moment(folder: str, moment: str, ends: str) -> None:
    """Rank 2 ends at a moment; the others go on and write what they raise."""
    group: Any = fpipe.init(timeout=TIMEOUT)
    assert isinstance(group, C10dGroup)
    rank = group.rank
    stages = [fpipe.Stage(_layer, name=f"layer{stage}") for stage in range(RANKS)]
    pipe = fpipe.pipeline(stages, "1F1B", loss=_square, microbatches=4, group=group)
    params = pipe.place([torch.eye(4) * 0.5 for _ in range(RANKS)])
    step = fpipe.value_and_grad(pipe)
    step(params, torch.ones(8, 4))
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    group.barrier()
    if rank == VICTIM:
        time.sleep(0.3)  # the journal is written
        if ends == "exits":
            return
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "a slow rank" and rank == SLOW:
        while not Path(folder, "error0").exists():
            time.sleep(0.05)
    try:
        if moment == "handshake":  # of another batch, which has no plans
            step(params, torch.ones(16, 4))
        elif moment == "save":
            fpipe.save(Path(folder, "saved"), pipe, params=params)
        elif moment == "load":
            fpipe.load(Path(folder, "saved"), pipe, "params")
        elif moment == "stream":
            list(fpipe.stream(pipe, params))
        else:
            group.barrier()
    except fpipe.FpipeError as error:
        Path(folder, f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("moment", "ends", "over"),
    [
        ("a slow rank", "is killed", "gloo"),
        ("handshake", "exits", "memory"),
        *also(
            ("save", "is killed", "memory"),
            ("load", "is killed", "gloo"),
            ("stream", "is killed", "gloo"),
            ("barrier", "exits", "memory"),
        ),
    ],
)
def test_a_rank_that_dies_while_others_meet_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, ends: str, over: str
):
    """In barrier, save, load, stream and the exchange of facts, they waited for their time-out,
    and for a rank that is only slow as long as that one was.
    """
    monkeypatch.setattr(launching, "GRACE", 30.0)  # of busy machines
    with pytest.raises(fpipe.FpipeError):
        fpipe.launch(_moment, str(tmp_path), moment, ends, ranks=RANKS, timeout=60, env=OVER[over])
    for rank in (0, SLOW):
        text = (tmp_path / f"error{rank}").read_text()
        assert text.startswith("PeerError: "), text
        pid = (tmp_path / f"pid{VICTIM}").read_text()
        assert re.search(rf"Look at rank {VICTIM} \(process {pid} on \S+\) first", text), text


def _leaves_early() -> None:
    group = fpipe.init(timeout=TIMEOUT)
    pipe = fpipe.pipeline([_layer] * 2, loss=_square, microbatches=2, group=group)
    if 0 not in group.here:
        fpipe.value_and_grad(pipe)(pipe.place([torch.eye(4)] * 2), torch.ones(4, 4))


def test_a_rank_that_returns_early_is_one_traceback():
    """That of the rank that waited; the text of the backend is in its message."""
    with pytest.raises(PeerError, match=r"the connection broke\. Rank 0 is gone") as caught:
        fpipe.launch(_leaves_early, ranks=2, timeout=TIMEOUT)
    assert str(caught.value.__cause__).count("Traceback (most recent call last)") == 1
    assert "the backend said: " in str(caught.value)
