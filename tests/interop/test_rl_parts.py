"""The parts of an engine for reinforcement learning that know no trainer: sequences, scores,
weights, checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.interop._rl.heads import scores
from fpipe.interop._rl.sequences import tokens_of
from fpipe.interop._rl.weights import Weights
from fpipe.saving import export_model

DRAW = torch.Generator().manual_seed(0)


def jagged(*parts: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def sequences(*lengths: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions."""
    ids = jagged(*(torch.randint(1, 30, (n,), generator=DRAW) for n in lengths))
    return ids, jagged(*(torch.arange(n) for n in lengths))


# ---- scores ----
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("tempered", [False, True])
def test_scores_and_gradients_are_those_of_plain_torch(chunk: int, tempered: bool):
    logits = torch.randn(2, 4, 9, generator=DRAW, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(9, (2, 4), generator=DRAW)
    temperature = torch.rand(2, 4, generator=DRAW).double() + 0.5 if tempered else None
    found = scores(logits, labels, temperature, chunk=chunk, entropy=True)
    logs = (logits if temperature is None else logits / temperature[..., None]).log_softmax(-1)
    expected = logs.gather(-1, labels[..., None]).squeeze(-1), -(logs.exp() * logs).sum(-1)
    torch.testing.assert_close(tuple(found), expected)
    weights = torch.randn(2, 2, 4, generator=DRAW, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((a * weights[0] + b * weights[1]).sum(), logits)[0]
        for a, b in ((found.log_probs, found.entropy), expected)
    )
    torch.testing.assert_close(ours, theirs)


def test_scores_of_narrow_logits_are_wide():
    logits = torch.randn(5, 7, generator=DRAW).bfloat16().requires_grad_()
    found = scores(logits, torch.zeros(5, dtype=torch.long), chunk=2)
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, logits.float().log_softmax(-1)[:, 0])
    assert torch.autograd.grad(found.log_probs.sum(), logits)[0].dtype == torch.bfloat16


# ---- sequences ----
def test_temperatures_of_single_sequences():
    ids, positions = sequences(2, 1)
    tokens = tokens_of(ids, positions, torch.tensor([0.5, 2.0]))
    assert tokens.temperature is not None
    assert tokens.temperature.tolist() == [[0.5, 0.5, 2.0]]
    assert tokens_of(ids, positions, 1.0).temperature is None


def test_values_sequence_by_sequence():
    ids, positions = sequences(3, 5)
    tokens = tokens_of(ids, positions)
    assert [len(part) for part in tokens.nested(tokens.input_ids).unbind()] == [3, 5]


def test_mistakes_in_sequences():
    _, positions = sequences(3, 6)
    with pytest.raises(fpipe.errors.BatchError, match="nested"):
        tokens_of(torch.ones(2, 3), positions)


def test_weights_know_frozen_parameters_by_name():
    """Pytrees have the names of a dict in order, the dict itself does not."""
    stages = [fpipe.Stage(lambda p, x: x @ p["b"] @ p["a"], frozen=("a",))]
    pipe = fpipe.pipeline(stages, loss=torch.sum, microbatches=1, group=fpipe.local(1))
    weights = Weights(pipe, [{"b": torch.eye(2), "a": torch.eye(2)}])
    assert [name for _, name, leaf in weights if leaf.requires_grad] == ["b"]


# ---- packed sequences of a model ----
@pytest.fixture(scope="module")
def tied() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).eval()


def test_packed_sequences_have_the_log_probs_of_single_ones(tied: Any):
    """A trace cannot look whether positions begin again, and must take it that they do."""
    stages, params = fpipe.interop.huggingface.stages(tied, 4)
    pipe = fpipe.pipeline(stages, "ZBV", group=fpipe.local(2))
    ids, positions = sequences(5, 3, 7)
    tokens = tokens_of(ids, positions)
    side: dict[str, Any] = {"position_ids": fpipe.Microbatches([tokens.position_ids])}
    with torch.no_grad():
        (logits,) = pipe(
            params, fpipe.Microbatches([tokens.input_ids]), **side, each=lambda number, y: y
        )
        found = tokens.nested(scores(logits, tokens.labels).log_probs)
        for row, one in zip(found.unbind(), ids.unbind(), strict=True):
            alone = tied(one[None]).logits[0].log_softmax(-1)
            torch.testing.assert_close(row[:-1], alone[:-1].gather(-1, one[1:, None]).squeeze(-1))


# ---- weights ----
def trained(
    pipe: fpipe.Pipeline, weights: Weights, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Losses of a few steps with clipped gradients."""
    losses = []
    for step in range(steps):
        ids = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss, grads = fpipe.value_and_grad(pipe)(weights.for_call(), ids, ids)
        weights.add_grads(grads)
        nn.utils.clip_grads_with_norm_(weights.trained(), 1.0, weights.norm())
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_model(
    model: nn.Module, schedule: str = "ZBV", ranks: int = 2
) -> tuple[fpipe.Pipeline, Weights]:
    stages, params = fpipe.interop.huggingface.stages(model, 4)
    loss = fpipe.interop.huggingface.causal_loss
    pipe = fpipe.pipeline(stages, schedule, loss=loss, microbatches=2, group=fpipe.local(ranks))
    return pipe, Weights(pipe, [{name: p.clone() for name, p in row.items()} for row in params])


def test_a_torch_optimizer_updates_tied_parameters_once(tied: Any):
    import copy

    model = copy.deepcopy(tied)
    pipe, weights = of_model(model)
    ours = trained(pipe, weights, torch.optim.AdamW(weights.trained(), lr=1e-2), 3)
    assert len(weights.trained()) == len(list(model.parameters()))
    optimizer, theirs = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        ids = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_tied_tensors_of_one_process_are_not_updated_twice(tied: Any):
    """With a schedule with a V, embedding and head are on one rank, and may be one memory."""
    stages, params = fpipe.interop.huggingface.stages(tied, 4)
    pipe = fpipe.pipeline(stages, "ZBV", group=fpipe.local(2))
    weights = Weights(pipe, params)
    assert len({id(leaf) for leaf in weights.trained()}) == len(
        {leaf.data_ptr() for leaf in weights.trained()}
    )


def test_gradients_of_several_batches_are_added(tied: Any):
    pipe, weights = of_model(tied)
    ids = torch.randint(32, (4, 6), generator=DRAW)
    for _ in range(2):
        weights.add_grads(fpipe.value_and_grad(pipe)(weights.for_call(), ids, ids)[1])
    once = Weights(pipe, weights.values())
    once.add_grads(fpipe.value_and_grad(pipe)(weights.for_call(), ids, ids)[1])
    assert weights.norm().item() == pytest.approx(2 * once.norm().item(), rel=1e-6)


def test_a_narrow_copy_is_passed_to_the_pipeline(tied: Any):
    pipe, plain = of_model(tied)
    weights = Weights(pipe, plain.values(), compute=torch.bfloat16)
    passed = [leaf for row in weights.for_call() for leaf in (row or {}).values()]
    assert {leaf.dtype for leaf in passed} == {torch.bfloat16}
    assert {leaf.dtype for leaf in weights.trained()} == {torch.float32}


def test_a_checkpoint_resumes_under_another_schedule(tied: Any, tmp_path: Path):
    pipe, weights = of_model(tied)
    optimizer = torch.optim.AdamW(weights.trained(), lr=1e-2)
    trained(pipe, weights, optimizer, 2)
    weights.save(tmp_path / "fpipe", optimizer, {"steps": 2})
    onward = trained(pipe, weights, optimizer, 2)
    pipe, weights = of_model(tied, "1F1B", ranks=4)
    optimizer = torch.optim.AdamW(weights.trained(), lr=1e-2)
    assert weights.load(tmp_path / "fpipe", optimizer, ["model", "optimizer"]) == {"steps": 2}
    assert trained(pipe, weights, optimizer, 2) == pytest.approx(onward, rel=1e-6)


def test_a_checkpoint_as_a_model_of_hugging_face(tied: Any, tmp_path: Path):
    _, weights = of_model(tied)
    weights.save(tmp_path / "fpipe", None, {})
    export_model(tmp_path / "fpipe", tmp_path / "model")
    tied.config.save_pretrained(tmp_path / "model")
    again = type(tied).from_pretrained(tmp_path / "model")
    for name, p in tied.named_parameters():
        assert torch.equal(p, again.get_parameter(name))


def test_states_of_other_shapes_are_refused(tied: Any):
    _, weights = of_model(tied)
    optimizer = torch.optim.SGD(weights.trained(), lr=0.1)
    optimizer.state[weights.trained()[0]] = {"sketch": torch.zeros(3)}
    with pytest.raises(fpipe.errors.CheckpointError, match="'sketch' of shape"):
        weights.state_of(optimizer)


def test_exports_have_tied_parameters_under_both_names(tied: Any):
    _, weights = of_model(tied)
    found = dict(weights.exported({"model.embed_tokens.weight": ["lm_head.weight"]}, 1 << 20))
    expected = tied.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_adapters_their_second_factors_are_zero():
    names = ["q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight"]
    pipe = fpipe.pipeline([lambda p, x: x], microbatches=1, group=fpipe.local(1))
    weights = Weights(pipe, [{name: torch.ones(2) for name in names}])
    found = weights.for_call(adapted=False)[0]
    assert found is not None
    assert [found[name].sum().item() for name in names] == [2, 2, 0]
    assert all(leaf.sum() == 2 for _, _, leaf in weights)
