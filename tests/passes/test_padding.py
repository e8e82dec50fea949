"""``pad``: lengths, fills, stripping, and that a pad adds exactly nothing where the model masks
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import fpipe


def microbatch(length: int, rows: int = 2, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 9, (rows, length), generator=draw),
        "attention_mask": torch.ones(rows, length, dtype=torch.bool),
        "labels": torch.randint(1, 9, (rows, length), generator=draw),
        "position_ids": torch.arange(length).expand(rows, length),
        "advantage": torch.rand(rows, length, generator=draw),
        "reward": torch.rand(rows, generator=draw),
        "name": f"length {length}",
        "nothing": None,
    }


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    multiple=st.integers(1, 5),
    uniform=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_leaf_is_its_own_again(lengths: list[int], multiple: int, uniform: bool, seed: int):
    before = [microbatch(length, seed=seed) for length in lengths]
    after, unpad = fpipe.pad(before, multiple, uniform)
    sizes = [mb["input_ids"].shape[1] for mb in after]
    rounded = [-(-length // multiple) * multiple for length in lengths]
    assert sizes == ([max(rounded)] * len(lengths) if uniform else rounded)
    for old, new, size in zip(before, after, sizes, strict=True):
        length = old["input_ids"].shape[1]
        for name, fill in {
            "input_ids": 0,
            "attention_mask": False,
            "labels": -100,
            "advantage": 0.0,
        }.items():
            assert new[name].dtype == old[name].dtype
            assert torch.equal(new[name][:, :length], old[name])
            assert (new[name][:, length:] == fill).all()
        assert new["position_ids"].tolist() == [[*range(length), *range(size - length)]] * 2
        assert new["reward"] is old["reward"]
        assert new["name"] == old["name"]
    back = unpad([{"logits": mb["advantage"].unsqueeze(-1), "name": mb["name"]} for mb in after])
    for old, new in zip(before, back, strict=True):
        assert torch.equal(new["logits"].squeeze(-1), old["advantage"])
        assert new["name"] == old["name"]


def test_values_by_name_and_pattern():
    given_one = {
        "a": {"mask": torch.ones(1, 2)},
        "b": torch.ones(1, 2),
        "log_probs": torch.ones(1, 2),
    }
    (made,), _ = fpipe.pad([given_one], 4, values={"a.mask": 7, "*": 5, "log_*": None})
    assert made["a"]["mask"].tolist() == [[1, 1, 7, 7]]
    assert made["b"].tolist() == [[1, 1, 5, 5]]
    assert made["log_probs"].tolist() == [[1, 1, 5, 5]]  # the first pattern that fits
    (made,), _ = fpipe.pad([given_one], 4, values={"log_probs": None, "mask": 2})
    assert made["log_probs"].shape == (1, 2)
    assert made["a"]["mask"].tolist() == [[1, 1, 2, 2]]


def test_packed_rows_restart_their_positions_in_the_pad():
    packed = {"tokens": torch.ones(1, 5), "positions": torch.tensor([[0, 1, 2, 0, 1]])}
    (made,), _ = fpipe.pad([packed], 8)
    assert made["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    flat, unpad = fpipe.pad([{name: row[0] for name, row in packed.items()}], 8, axis=0)
    assert flat[0]["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert unpad(torch.zeros(8, 3), 0).shape == (5, 3)


def test_arguments_are_left_alone_and_whole_lengths_are_not_copied():
    one = microbatch(4)
    made, unpad = fpipe.pad([one], 4)
    assert made[0]["labels"] is one["labels"]
    y = torch.zeros(2, 4, 3)
    assert unpad([y])[0] is y
    assert isinstance(made, fpipe.Microbatches)


def test_lengths_are_reported_by_what_must_be_a_sequence():
    ids, row = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 1)
    for other in (
        row,
        torch.ones(2, 3, 4, 4),
        torch.ones(2, 16),
    ):  # a number a row, an image, features
        (made,), _ = fpipe.pad(
            [{"another": other, "input_ids": ids, "log_probs": torch.ones(2, 9)}], 4
        )
        assert made["another"] is other
        assert made["input_ids"].shape == made["log_probs"].shape == (2, 12)
    packed = {"begins": torch.tensor([0, 3]), "tokens": torch.ones(5)}
    (made,), unpad = fpipe.pad([packed], 4, axis=0, length="tok*")
    assert made["begins"] is packed["begins"]
    assert unpad(made["tokens"], 0).shape == (5,)


# ---- a pad adds nothing ----
def embed(p: Any, x: Tensor) -> Tensor:
    return p["table"][x]


def attend(p: Any, x: Tensor, *, keep: Tensor) -> Tensor:
    q, k, v = (x @ p["qkv"]).chunk(3, -1)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & keep[:, None]
    scores = (q @ k.mT).masked_fill(~seen, -1e9)
    return x + torch.softmax(scores, -1) @ v


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def test_a_pad_adds_nothing_to_loss_and_gradients():
    draw = torch.Generator().manual_seed(0)
    w = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    params = [{"table": w(9, 4)}, {"qkv": w(4, 12)}, {"qkv": w(4, 12)}, {"head": w(4, 9)}]
    stages = [embed, attend, attend, lambda p, x: x @ p["head"]]
    pipe = fpipe.pipeline(stages, "1F1B", loss=summed, reduction="sum", group=fpipe.local(2))

    def run(parts: Any) -> Any:
        x, labels, keep = (
            fpipe.Microbatches(mb[n] for mb in parts)
            for n in ("input_ids", "labels", "attention_mask")
        )
        return fpipe.value_and_grad(pipe)(params, x, labels, keep=keep)

    parts = [microbatch(length, seed=length) for length in (3, 5, 4)]
    loss, grads = run(parts)
    for multiple, uniform in ((8, True), (4, False)):
        padded, _ = fpipe.pad(parts, multiple, uniform)
        more, again = run(padded)
        torch.testing.assert_close(more, loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(again, grads, rtol=1e-13, atol=1e-14)
        other, _ = fpipe.pad(
            parts, multiple, uniform, values={"input_ids": 5}
        )  # for any values in the pad
        same, once_more = run(other)
        assert torch.equal(same, more)
        assert all(
            torch.equal(a[n], b[n]) for a, b in zip(once_more, again, strict=True) for n in a
        )


# ---- mistakes ----
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fpipe.pad([microbatch(3)], 0), "multiple=0; give a whole number"),
        (lambda: fpipe.pad([microbatch(3)], True), "multiple=True; give a whole number"),
        (lambda: fpipe.pad([]), "empty"),
        (
            lambda: fpipe.pad([microbatch(3), {"reward": torch.ones(2)}]),
            "microbatch 1 has no tensor with an axis 1",
        ),
        (
            lambda: fpipe.pad([microbatch(3)], values={"labels": "ignore"}),
            r"values\['labels'\] is 'ignore'; give a number",
        ),
        (
            lambda: fpipe.pad([{"input_ids": torch.ones(2, 3), "mask": torch.ones(2, 1, 3, 3)}], 4),
            r"'mask' of shape \[2, 1, 3, 3\] looks like a mask from tokens to tokens",
        ),
        (
            lambda: fpipe.pad(
                [{"input_ids": torch.ones(2, 3), "seen": torch.ones(2, 3, 3, dtype=torch.bool)}], 4
            ),
            r"'seen' of shape \[2, 3, 3\] looks like a mask from tokens to tokens",
        ),
        (
            lambda: fpipe.pad([{"a": torch.ones(2, 1), "b": torch.ones(2, 3)}], 4),
            r"several lengths on axis 1: 'a' of 1, 'b' of 3; name one that has .*, as in "
            r"length='input_ids'",
        ),
        (
            lambda: fpipe.pad([microbatch(3)], length="ids"),
            "no tensor called 'ids' with an axis 1.* axis= or length=",
        ),
        (lambda: fpipe.pad([microbatch(3)], 4)[1]([1, 2]), "one for each of the 1 microbatches"),
        (
            lambda: fpipe.pad([microbatch(3)], 4)[1](torch.ones(1, 4)),
            r"pass unpad\(output, index\) for a single one",
        ),
    ],
)
def test_mistakes(call: Any, message: str):
    with pytest.raises(fpipe.errors.BatchError, match=message):
        call()


def test_labels_called_y_do_not_count():
    parts = [{"x": torch.ones(1, n), "y": torch.ones(1, n, dtype=torch.long)} for n in (3, 5)]
    padded, _ = fpipe.pad(parts, uniform=True)
    assert padded[0]["y"].tolist() == [[1, 1, 1, -100, -100]]
    assert padded[0]["x"].tolist() == [[1, 1, 1, 0, 0]]
