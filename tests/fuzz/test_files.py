"""Two mutations of each kind of file that fpipe reads: ``python -m tests.fuzz.files`` runs more."""

from __future__ import annotations

import pytest

pytest.importorskip("safetensors.torch")

from .files import ORDER, run


@pytest.mark.parametrize("seed", range(2 * len(ORDER)))
def test_a_changed_file_is_read_as_it_is_or_refused(seed: int):
    found = run(seed)
    assert found.kind in ("right", "error"), (
        f"{found.text}\npython -m tests.fuzz.files --mutation {seed} runs this again"
    )
