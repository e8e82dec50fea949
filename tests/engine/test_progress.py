"""A line on a terminal that shows which stage is being traced."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch

import fpipe
from fpipe.actions import progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the body of a test: pytest sets stderr between fixtures and test."""
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    return stream


def traced() -> None:
    def slow(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return x * p

    pipe = fpipe.pipeline(
        [slow, lambda p, x: slow(p, x)],
        loss=lambda y: y.sum(),
        group=fpipe.local(2),
        microbatches=2,
    )
    fpipe.grad(pipe)([torch.ones(())] * 2, torch.ones(4))


def test_a_long_trace_shows_its_stages_and_erases_them(monkeypatch: pytest.MonkeyPatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_line, "AFTER", 0.01)
    traced()
    text = terminal.getvalue()
    assert "tracing stage 2 of 2" in text
    assert text.rindex("\x1b[2K") > text.rindex("tracing")


def test_a_short_trace_shows_nothing(monkeypatch: pytest.MonkeyPatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_line, "AFTER", 1000.0)
    traced()
    assert terminal.getvalue() == ""


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_line, "AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    traced()
    assert stream.getvalue() == ""
