"""Decoders of the transformers package, cut into stages: each family equals its unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import fpipe
import huggingface_survey
from fpipe import tree
from fpipe.interop import huggingface, layer_blocks
from fpipe.interop.huggingface.units import units_of
from fpipe.programs.trace_one import trace
from huggingface_decoders import ACCEPTANCE, FAMILIES, decoder, distance, tokens, unsplit
from sample import also

ROWS, MICROBATCHES = 4, 2


def run(
    model: Any, stages: int | None = 2, *, side: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Loss and gradients of a split model, on one rank that holds all stages."""
    made, params = huggingface.stages(model, stages, **options)
    pipe = fpipe.pipeline(
        made,
        "LoopedBFS",
        loss=huggingface.causal_loss,
        microbatches=MICROBATCHES,
        group=fpipe.local(1),
    )
    return fpipe.value_and_grad(pipe)(params, tokens(ROWS), tokens(ROWS), **(side or {}))


#: The others are split in 4 and 8 stages, under every schedule, by
#: test_huggingface_all_schedules.py.
OTHERS = [family for family in FAMILIES if family not in ACCEPTANCE]
#: Of these, a sliding window has qwen2 too, and other tests of this file compare others.
ALIKE = ("mistral", "gemma2", "gemma3", "granite", "gpt-neox")


def agrees(model: Any, found: tuple[Any, Any], **side: Any) -> bool:
    """Whether loss and gradients are those of the unsplit model."""
    loss, grads = found
    want, reference = unsplit(model, MICROBATCHES, tokens(ROWS), **side)
    return abs(float(loss / want) - 1) < 1e-6 and distance(grads, reference) < 1e-6


@pytest.mark.parametrize("family", [*(f for f in OTHERS if f not in ALIKE), *also(*ALIKE)])
def test_family_equals_unsplit(family: str):
    model = decoder(family, layers=2)
    found = run(model)
    assert {name for own in found[1] for name in own} == {
        n for n, _ in model.named_parameters(remove_duplicate=False)
    }
    assert (
        getattr(model.config, "_experts_implementation", None) != "batched_mm"
    )  # the model itself was not changed
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert agrees(model, found)


def padded() -> dict[str, Any]:
    mask = torch.ones(ROWS, 7, dtype=torch.long)
    mask[1, 5:], mask[2, 3:] = 0, 0
    return {"attention_mask": mask}


def packed() -> dict[str, Any]:
    return {"position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(ROWS, 7)}


@pytest.mark.parametrize(
    ("family", "side"),
    [("gemma3", padded), *also(("llama", packed), ("gpt2", packed), ("mixtral", padded))],
)
def test_masks_and_positions_are_side_inputs(family: str, side: Any):
    model = decoder(family, layers=2)
    found = run(model, side=side())
    assert agrees(model, found, **side())
    assert not agrees(model, found)  # they do matter


def test_tied_and_frozen_are_carried():
    model = decoder("gpt2", layers=3)
    model.transformer.wpe.weight.requires_grad_(False)
    model.transformer.h[1].attn.c_attn.bias.requires_grad_(False)
    stages, params = huggingface.stages(model, 3)
    assert stages[0].ties == (("transformer.wte.weight", "transformer.wte.weight"),)
    assert stages[2].ties == (("lm_head.weight", "transformer.wte.weight"),)
    assert [s.frozen for s in stages] == [
        ("transformer.wpe.weight",),
        ("transformer.h.1.attn.c_attn.bias",),
        (),
    ]
    assert params[2]["lm_head.weight"].data_ptr() == params[0]["transformer.wte.weight"].data_ptr()
    loss, grads = run(model, 3)
    assert grads[0]["transformer.wpe.weight"] is None
    assert torch.equal(grads[0]["transformer.wte.weight"], grads[2]["lm_head.weight"])
    assert agrees(model, (loss, grads))


@pytest.mark.long
def test_ends_alone():
    """The last stage may be the norm and the head alone."""
    model = decoder("gemma2", layers=2)
    found = run(model, None, cuts=[1, 2])
    assert sorted(found[1][2]) == ["lm_head.weight", "model.norm.weight"]
    assert agrees(model, found)


def test_checkpointed_layers_are_recomputed():
    model = decoder("llama", layers=2, train=True)
    plain = huggingface.stages(model, 2)
    model.gradient_checkpointing_enable()
    stages, params = huggingface.stages(model, 2)
    x = torch.randn(2, 7, 16)
    made, usual = trace(stages[1], params[1], x), trace(plain[0][1], params[1], x)
    assert made.saved_bytes < usual.saved_bytes / 3
    (y, saved), (want, kept) = made.forward(params[1], x), usual.forward(params[1], x)
    assert torch.equal(y, want)
    torch.testing.assert_close(made.backward(saved, y), usual.backward(kept, y))
    assert model.base_model.layers[1].gradient_checkpointing


def test_checkpointed_layers_on_autograd():
    """They are computed again in the backward with the parameters of the call, not with those of
    the module.
    """
    plain, model = (decoder("llama", layers=2, train=True) for _ in range(2))
    model.gradient_checkpointing_enable()
    loss, x = lambda y: y.square().mean(), torch.arange(12).view(2, 6)
    found = []
    for each in (plain, model):
        stages, params = huggingface.stages(each, 2)
        pipe = fpipe.pipeline(
            stages, loss=loss, microbatches=1, group=fpipe.local(2), engine="eager"
        )
        found.append(tree.leaves(fpipe.grad(pipe)(params, x)))
    assert all(map(torch.equal, *found))


def test_a_heavy_head_gets_fewer_layers():
    model = decoder("llama", layers=6, vocab_size=200)
    stages, _ = huggingface.stages(model, 3)
    assert [stage.name for stage in stages] == [
        f"LlamaForCausalLM[{span}]" for span in ("0:2", "2:5", "5:6")
    ]


# ---- losses ----
def mean_over_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """NaN without labels."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("loss", [huggingface.causal_loss, mean_over_labels])
def test_a_microbatch_without_tokens_counts_nothing(loss: Any):
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    pipe = fpipe.pipeline(
        [lambda p, x: x * p],
        loss=loss,
        microbatches=2,
        group=fpipe.local(1),
        reduction=fpipe.weighted(lambda target: (target[:, 1:] != -100).sum()),
    )
    value, grads = fpipe.value_and_grad(pipe)(
        [torch.ones(7)], torch.cat([logits, logits]), torch.cat([targets, torch.full((2, 5), -100)])
    )
    alone = fpipe.pipeline([lambda p, x: x * p], loss=loss, microbatches=1, group=fpipe.local(1))
    other, expected = fpipe.value_and_grad(alone)([torch.ones(7)], logits, targets)
    torch.testing.assert_close(value, other)
    torch.testing.assert_close(grads[0], expected[0])


def test_the_sum_over_labels():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 3:] = -100
    count = (labels[:, 1:] != -100).sum()
    assert torch.equal(
        huggingface.causal_loss_sum(logits, labels) / count, mean_over_labels(logits, labels)
    )
    assert torch.equal(huggingface.causal_loss(logits, labels), mean_over_labels(logits, labels))
    assert float(huggingface.causal_loss_sum(logits, torch.full((2, 5), -100))) == 0


# ---- experts ----
def test_a_loss_of_routers_is_refused():
    """It is the product of two sums over all layers, which no sum over stages can express."""
    model = decoder("mixtral", layers=2)
    model.config.output_router_logits = True
    with pytest.raises(fpipe.errors.StageError, match="set output_router_logits=False"):
        huggingface.stages(model, 2)


def test_stages_without_experts_are_traced():
    """Experts of dbrx cannot be traced; its head can."""
    stages, _ = huggingface.stages(huggingface_survey.small("dbrx"), None, cuts=[4])
    assert [stage.engine for stage in stages] == ["eager", None]


def test_experts_of_bfloat16_trace_as_grouped_products():
    model = decoder("mixtral", layers=1).to(torch.bfloat16)
    stages, params = huggingface.stages(model, 1)
    assert stages[0].engine is None
    assert "grouped_mm" in trace(stages[0], params[0], tokens(2)).forward.code


# ---- mistakes ----
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 4}, r"n=4 stages of 2 layers and a head; give 1 to 3"),
        ({"n": 0}, r"n=0 stages"),
        ({}, "say how many stages"),
        ({"n": 2, "cuts": [1]}, "one of both"),
        ({"cuts": [2, 1]}, "give ascending layer indices from 1 to 2"),
        ({"cuts": [0]}, "give ascending layer indices from 1 to 2"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str):
    with pytest.raises(fpipe.errors.StageError, match=message):
        huggingface.stages(decoder("llama", layers=2), **options)


def test_a_model_whose_forward_fails_is_refused():
    model = decoder("llama", layers=2)
    model.lm_head = torch.nn.Linear(3, 4)
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"cannot split LlamaForCausalLM: its own forward fails on 4 tokens",
    ):
        huggingface.stages(model, 2)


class Backwards(torch.nn.ModuleList):
    """Layers that run in another order than they are registered."""

    def __getitem__(self, index: Any) -> Any:
        return [*reversed(list(self))] if isinstance(index, slice) else super().__getitem__(index)


def test_layers_are_cut_in_the_order_in_which_they_run():
    model = decoder("llama", layers=4)
    model.model.layers = Backwards(model.model.layers)
    _, params = huggingface.stages(model, None, cuts=[1])
    assert {name.split(".")[2] for name in params[0] if "layers" in name} == {"3"}
    assert agrees(model, run(model))


# ---- what families do between layers ----
#: what a family needs, and one that does
NEEDS = {
    "layers that return tuples": "bloom",
    "layers one level deeper, and a probability to drop them": "opt",
    "a list of other modules beside the layers": "granite_swa",
    "attributes of layers": "nemotron_h",
    "parameters between layers": "zaya",
    "a norm without parameters": "nanochat",
    "values for each layer from one table": "gemma4_text",
}
SLOW = {"bloom", "opt", "nemotron_h", "zaya", "gemma4_text"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=need, marks=[pytest.mark.long] * (family in SLOW))
        for need, family in NEEDS.items()
    ],
)
def test_what_families_do_between_layers(family: str):
    row = huggingface_survey.examine(family, ["1F1B"])
    assert row.end == "right", row


def test_experts_whose_code_cannot_be_traced_run_on_autograd():
    assert huggingface_survey.examine("dbrx", ["1F1B"]).end == "untraced"


def passed(model: Any, cuts: list[int]) -> list[int]:
    """How many tensors each stage takes."""
    stages, _ = huggingface.stages(model, cuts=cuts)
    return [len(stage.fn.part.receives) for stage in stages[1:]]


def test_only_what_later_layers_use_is_passed_on():
    assert passed(decoder("llama", layers=3), [1, 2]) == [1, 1]
    assert passed(huggingface_survey.small("zamba"), [2, 4]) == [2, 2]  # and the embeddings


@pytest.mark.parametrize("family", ["bloom", *also("llama", "opt")])
def test_equal_layers_are_traced_once(family: str):
    model = huggingface_survey.small(family)
    stages, params = huggingface.stages(model, 1)
    trace(stages[0], params[0], tokens(2))
    layers = [stages[0].fn.module.get_submodule(name) for name in units_of(model).layers]
    shared = set(map(layer_blocks.shared_by_equals, layers))
    assert len(shared) == 1
    assert not any(layer.alone for layer in shared)


def seq2seq() -> Any:
    """A T5 with two layers on each side."""
    shape = {
        "vocab_size": 48,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    config = transformers.T5Config(
        num_layers=2, num_decoder_layers=2, decoder_start_token_id=0, **shape
    )
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3-moe"])
def test_one_trace_serves_every_length(family: str):
    """Warnings are errors here: a stage that is traced for every size warns."""
    model = decoder(family, layers=2)
    stages, params = huggingface.stages(model, 2)
    pipe = fpipe.pipeline(
        stages,
        "1F1B",
        loss=lambda logits, labels: huggingface.causal_loss(logits, labels),  # with no traces
        microbatches=MICROBATCHES,
        group=fpipe.local(2),
    )
    step = fpipe.profile(fpipe.value_and_grad(pipe))
    counts = []
    for length in (7, 9, 12, 5):
        before, ids = step.prepared.traces, tokens(ROWS, length)
        found = step(params, ids, ids)
        counts.append(step.prepared.traces - before)
        want, reference = unsplit(model, MICROBATCHES, ids)
        assert abs(float(found[0] / want) - 1) < 1e-6
        assert distance(found[1], reference) < 1e-6
    assert counts[2:] == [0, 0]


def test_an_encoder_and_a_decoder():
    model, mask = seq2seq(), padded()["attention_mask"].flip(1)
    labels = tokens(ROWS, 5, seed=2)
    loss = lambda y, t: torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())
    stages, params = huggingface.stages(model, cuts=[1, 3])
    pipe = fpipe.pipeline(
        stages, "GPipe", loss=loss, microbatches=MICROBATCHES, group=fpipe.local(3)
    )
    side = {
        "attention_mask": mask,
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
    }
    value, grads = fpipe.value_and_grad(pipe)(params, tokens(ROWS), labels, **side)
    want = sum(
        loss(
            model(input_ids=part, **{n: v.chunk(MICROBATCHES)[i] for n, v in side.items()}).logits,
            t,
        )
        / MICROBATCHES
        for i, (part, t) in enumerate(
            zip(tokens(ROWS).chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        )
    )
    want.backward()
    assert abs(float(value / want.detach()) - 1) < 1e-6
    reference = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    assert distance(grads, reference) < 1e-6


def test_a_decoder_behind_an_encoder_needs_its_tokens():
    """BART makes them from token ids, which later stages do not have: other values, no error."""
    config = transformers.BartConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        **(SMALL | {"max_position_embeddings": 32}),
    )
    model = transformers.BartModel(config).eval()
    stages, params = huggingface.stages(model, 2)
    pipe = fpipe.pipeline(stages, microbatches=2, group=fpipe.local(2))
    with pytest.raises(fpipe.errors.StageError, match=r"give decoder_input_ids="):
        pipe(params, tokens(ROWS))
    y = pipe(params, tokens(ROWS), decoder_input_ids=tokens(ROWS, 5, seed=2))
    want = model(tokens(ROWS), decoder_input_ids=tokens(ROWS, 5, seed=2)).last_hidden_state
    torch.testing.assert_close(y, want)


def test_other_inputs_than_token_ids_need_an_example():
    shape = {
        "d_model": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
    }
    shape |= {
        "decoder_ffn_dim": 24,
        "max_source_positions": 8,
        "num_mel_bins": 8,
        "vocab_size": 48,
        "dropout": 0.0,
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(encoder_layers=1, decoder_layers=1, **shape, **ends)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with pytest.raises(
        fpipe.errors.StageError,
        match="takes 'input_features' in place of token ids; give an example",
    ):
        huggingface.stages(model, 2)
    sound, ids = torch.randn(2, 8, 16), tokens(2, 5)
    stages, params = huggingface.stages(
        model, 2, example={"input_features": sound, "decoder_input_ids": ids}
    )
    y = stages[1](
        params[1], stages[0](params[0], sound, decoder_input_ids=ids), decoder_input_ids=ids
    )
    torch.testing.assert_close(y, model(input_features=sound, decoder_input_ids=ids).logits)


class Rows(torch.utils.data.Dataset[Any]):
    """Six batches of four rows; some labels are ignored."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = tokens(1, seed=index)[0]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(7) < index % 3, -100)}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers(tmp_path: Path):
    """Its own loop, optimizer, clipping, schedule and accumulation give the same weights with a
    pipeline's step.
    """
    pytest.importorskip("accelerate")

    def trained(pipelined: bool) -> Any:
        model = decoder("llama", layers=2, train=True)
        step = {
            "training_step": huggingface.trainer(model, 2, microbatches=2, group=fpipe.local(2))
        }
        options = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=3,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            learning_rate=0.1,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
        )
        cls = type("Piped", (transformers.Trainer,), step if pipelined else {})
        trainer = cls(model=model, args=options, train_dataset=Rows())
        return trainer.train().training_loss, model.state_dict()

    (loss, found), (reference, want) = trained(True), trained(False)
    assert abs(loss / reference - 1) < 1e-6
    assert all(torch.allclose(found[name], want[name], rtol=1e-4, atol=1e-6) for name in want)


class Noisy(torch.nn.Module):
    """A decoder around another one, which draws noise for each of its layers."""

    def __init__(self, model: Any, each: bool):
        super().__init__()
        self.model, self.config, self.each = model, model.config, each

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.model.model.embed_tokens(input_ids)
        noise = torch.nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        place = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        for layer in self.model.model.layers:
            if self.each:
                noise = torch.nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
            x = layer(x * noise, position_embeddings=self.model.model.rotary_emb(x, place))
        return self.model.lm_head(x)


def test_random_numbers_that_several_stages_need_are_refused():
    """Each stage would draw others, and the comparison of a cut is without random numbers."""
    model = decoder("llama", layers=2, train=True)
    with pytest.raises(
        fpipe.errors.StageError, match="several stages need the same random numbers"
    ):
        huggingface.stages(Noisy(model, each=False), 2)
    assert len(huggingface.stages(Noisy(model, each=True), 2)[0]) == 2
    assert len(huggingface.stages(Noisy(model, each=False).eval(), 2)[0]) == 2


def test_values_that_layers_read_in_training_alone_are_passed_on():
    """The comparison of a cut is in eval mode: there the first embeddings are not needed."""
    model = decoder("llama", layers=3, train=True)

    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            first = x = self.model.model.embed_tokens(input_ids)
            place = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            for layer in self.model.model.layers:
                x = x + first if self.training else x
                x = layer(x, position_embeddings=self.model.model.rotary_emb(x, place))
            return self.model.lm_head(x)

    whole = Reading().train()
    stages, params = huggingface.stages(whole, cuts=[1, 2])
    y: Any = tokens(2)
    for stage, own in zip(stages, params, strict=True):
        y = stage(own, y)
    torch.testing.assert_close(y, whole(tokens(2)))


def test_layers_that_are_dropped_at_random_are_refused():
    model = huggingface_survey.small("opt")
    model.model.decoder.layerdrop = 0.5
    with pytest.raises(
        fpipe.errors.StageError, match=r"drops layers at random in training \(layerdrop=0.5\)"
    ):
        huggingface.stages(model, 2)
    assert len(huggingface.stages(model.eval(), 2)[0]) == 2


@pytest.mark.parametrize(("order", "other"), [((1, 0), 1), ((0, 1, 0), 0)])
def test_a_stage_that_runs_other_layers_than_when_it_was_cut_is_refused(
    order: tuple[int, ...], other: int
):
    stages, params = huggingface.stages(decoder("llama", layers=2), 2)
    module = stages[1].fn.module.model
    module.layers = torch.nn.ModuleList(module.layers[layer] for layer in order)
    module.config.num_hidden_layers = len(order)
    pipe = fpipe.pipeline(stages, "GPipe", microbatches=1, group=fpipe.local(2))
    with pytest.raises(fpipe.FpipeError, match=rf"runs 'model\.layers\.{other}' where the model"):
        pipe(params, tokens(ROWS))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_comparison_leaves_no_trace(family: str):
    model = decoder(family, layers=2, train=True, attention_dropout=0.5)
    hooks = [
        (m._forward_hooks.copy(), m._forward_pre_hooks.copy(), m.training) for m in model.modules()
    ]
    config, state = model.config.to_dict(), torch.get_rng_state()
    stages, _ = huggingface.stages(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(m._forward_hooks, m._forward_pre_hooks, m.training) for m in model.modules()] == hooks
    assert model.config.to_dict() == config
    assert all(
        m.training
        for stage in stages
        for m in stage.fn.module.modules()
        if type(m).__name__ != "_Skip"
    )


def test_a_model_without_values_cannot_be_compared():
    model = decoder("llama", layers=2).to("meta")
    with pytest.warns(
        UserWarning, match="stages of LlamaForCausalLM were not compared with the model, because"
    ):
        stages, _ = huggingface.stages(model, 2)
    assert len(stages) == 2


@pytest.mark.parametrize("compiler", [False, True])
def test_from_module_shows_no_internals_of_torch(compiler: bool):
    """After a use of torch.compile, the message named a line of the compiler as the cause."""
    if compiler:
        torch.compile(torch.sin, backend="eager")
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"submodules: it needs a value that is known only when it runs, "
        r"at \S+/transformers/modeling_layers\.py:\d+.*DynamicCache.*huggingface.stages",
    ):
        fpipe.from_module(decoder("llama", layers=2), cuts=["model.layers.1"])


SMALL = {"vocab_size": 50, "num_attention_heads": 2, "intermediate_size": 16}


def test_bert_by_from_module():
    """The arguments of its forward, behind decorators, were confused."""
    model = transformers.BertModel(
        transformers.BertConfig(hidden_size=16, num_hidden_layers=2, **SMALL)
    ).eval()
    stages, params = fpipe.from_module(model, cuts=["encoder.layer.1"])
    pipe = fpipe.pipeline(
        stages,
        loss=lambda y: y.last_hidden_state[:, 0].sum(),
        microbatches=1,
        group=fpipe.local(2),
    )
    loss, grads = fpipe.value_and_grad(pipe)(params, tokens(ROWS))
    want = model(tokens(ROWS)).last_hidden_state[:, 0].sum()
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    reference = {name: p.grad for name, p in model.named_parameters()}
    for row in grads:
        for name, gradient in row.items():
            if reference[name] is not None:
                torch.testing.assert_close(gradient, reference[name])


def test_a_model_of_transformers_that_looks_at_values_is_sent_to_stages():
    config = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=2, bos_token_id=1, eos_token_id=7, **SMALL
    )
    model = transformers.CLIPTextModel(config).eval()
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"a value decides what it computes, at .*models of the transformers package are cut "
        r"by fpipe\.interop\.huggingface\.stages",
    ):
        fpipe.from_module(model, cuts=["encoder.layers.1"])
    stages, params = huggingface.stages(model, 2)
    y = stages[1](params[1], stages[0](params[0], tokens(ROWS)))
    torch.testing.assert_close(y, model(tokens(ROWS)).last_hidden_state)


@pytest.mark.long
def test_a_family_that_writes_into_a_parameter():
    """In training, Gemma 3n clips one in place: on autograd it is equal to the unsplit model."""
    model = huggingface_survey.small("gemma3n_text")
    stages, params = huggingface.stages(model, 2)
    run = lambda **more: fpipe.value_and_grad(
        fpipe.pipeline(
            stages, loss=huggingface.causal_loss, microbatches=2, group=fpipe.local(2), **more
        )
    )(params, tokens(ROWS), tokens(ROWS))
    with pytest.raises(fpipe.errors.TraceError, match="a stage writes into a parameter in place"):
        run()
    assert agrees(model, run(engine="eager"))


def test_other_modules_are_sent_to_from_module():
    with pytest.raises(
        fpipe.errors.StageError,
        match=r"Linear is no causal model of the transformers package; fpipe\.from_mod",
    ):
        huggingface.stages(torch.nn.Linear(2, 2), 1)


def test_a_model_inside_wrappers():
    """As PEFT wraps it: in a tuner, which is in another module."""

    class Tuner(torch.nn.Module):
        def __init__(self, model: Any):
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    class Wrapped(torch.nn.Module):
        def __init__(self, model: Any):
            super().__init__()
            self.base_model, self.config = Tuner(model), model.config

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return self.base_model(input_ids=input_ids, **kwargs)

    model = Wrapped(decoder("llama", layers=2))
    assert agrees(model, run(model))
