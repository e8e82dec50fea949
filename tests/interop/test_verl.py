"""The engine for verl, on a stand-in of the part of verl that it uses. ``benchmarks/trial_verl.py``
runs it in verl.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forked
import fpipe
import verl_stand_in
from verl_stand_in import Data

LENGTHS = (5, 3, 7, 4, 6, 2)


@pytest.fixture
def engines() -> Any:
    with verl_stand_in.installed():
        from fpipe.interop import verl

        yield verl


# ---- registration and options ----
def test_the_engine_is_registered_for_each_device_and_kind_of_model(engines: Any):
    found = verl_stand_in.EngineRegistry.engines
    for device in ("cpu", "cuda", "npu", "xpu"):
        assert found["language_model", "fpipe", device] is engines.FpipeEngine
        assert found["value_model", "fpipe", device] is engines.FpipeValueEngine
    assert "cpu" in verl_stand_in.PlatformRegistry.platforms
    places = [
        ("engine", "fpipe"),
        ("model_engine", "fpipe"),
        *((r, f"fpipe_{r}") for r in ("actor", "ref", "critic")),
    ]
    assert set(places) <= verl_stand_in.STORE.stored.keys()


def test_each_option_is_documented_with_its_default(engines: Any):
    text = (Path(engines.__file__).parent / "yaml" / "engine" / "fpipe.yaml").read_text(
        encoding="utf-8"
    )
    listed = dict(verl_stand_in.STORE.stored["engine", "fpipe"])
    assert listed.pop("_target_") == "fpipe.interop.verl.FpipeEngineConfig"
    assert listed == dataclasses.asdict(engines.FpipeEngineConfig())
    undocumented = [name for name in listed if not re.search(rf"^#.*\n{name}:", text, re.M)]
    assert not undocumented
    page = (Path(__file__).parents[2] / "docs" / "howto" / "verl.md").read_text(encoding="utf-8")
    assert not [name for name in listed if name != "strategy" and f"`{name}`" not in page]


@pytest.mark.parametrize(("option", "value"), [("dtype", "int8"), ("reduce_dtype", "half")])
def test_mistakes_in_options(engines: Any, option: str, value: str):
    with pytest.raises(fpipe.errors.StageError, match=f"engine.{option}='{value}'; give"):
        engines.FpipeEngineConfig(**{option: value})


# ---- an engine on two processes ----
def model(values: bool = False) -> Any:
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_labels=1,
    )
    torch.manual_seed(0)
    kind = transformers.Qwen2ForTokenClassification if values else transformers.Qwen2ForCausalLM
    return kind(config)


def batch(**more: Any) -> Data:
    draw = torch.Generator().manual_seed(0)
    jagged = lambda parts: torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    ids = [torch.randint(1, 32, (n,), generator=draw) for n in LENGTHS]
    return Data(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged(torch.arange(n) for n in LENGTHS),
            "loss_mask": jagged(torch.ones(n, dtype=torch.long) for n in LENGTHS),
            "temperature": 1.0,
            "micro_batch_size_per_gpu": 2,
            **more,
        }
    )


def negative(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss over all tokens but the last of each sequence, and metrics of other kinds than
    tensors.
    """
    rows = model_output["log_probs"].unbind()
    return -sum(row[:-1].sum() for row in rows) / (sum(LENGTHS) - len(LENGTHS)), {
        "rows": len(rows),
        "text": str(len(rows)),
    }


def log_probs(whole: nn.Module, data: Data) -> list[Tensor]:
    """Of the tokens of each sequence but the first, by the model without a pipeline."""
    rows = ((ids, whole(ids[None]).logits[0].log_softmax(-1)) for ids in data["input_ids"].unbind())
    return [logs[:-1].gather(-1, ids[1:, None]).squeeze(-1) for ids, logs in rows]


def built(engines: Any, folder: Path, values: bool = False, **options: Any) -> Any:
    import transformers

    config = SimpleNamespace(
        local_path=str(folder / ("values" if values else "model")),
        trust_remote_code=False,
        lora_rank=0,
        use_liger=False,
        enable_gradient_checkpointing=not values,
        get_processor=lambda: None,
        generation_config=None,
    )
    config.hf_config = transformers.AutoConfig.from_pretrained(config.local_path)
    config.get = lambda name, default=None: getattr(config, name, default)
    optimizer = SimpleNamespace(
        lr=1e-2,
        lr_warmup_steps=2,
        lr_warmup_steps_ratio=0.0,
        total_training_steps=9,
        clip_grad=1.0,
        get=lambda name, default: default,
    )
    contents = ["model", "optimizer", "extra", "hf_model"]
    checkpoint = SimpleNamespace(save_contents=contents, load_contents=contents)
    kind = engines.FpipeValueEngine if values else engines.FpipeEngine
    engine = kind(config, engines.FpipeEngineConfig(dtype="fp32", **options), optimizer, checkpoint)
    engine.initialize()
    return engine


def steps(engine: Any, count: int) -> list[tuple[float, float]]:
    """Losses and gradient norms, where the rank has them."""
    found = []
    for _ in range(count):
        with engine.train_mode():
            made = engine.train_batch(batch(), negative)
        engine.lr_scheduler_step()
        if engine.is_mp_src_rank_with_outputs():
            assert {row["text"] for row in made["metrics"]["each"]} == {"2"}
            found.append((sum(made["loss"]), made["metrics"]["grad_norm"]))
    return found


def on_process(folder: Path, long: bool) -> dict[str, Any]:
    """A run of the engine in one of two processes."""
    import torch.distributed as dist

    with verl_stand_in.installed():
        from fpipe.interop import verl as engines

        dist.init_process_group("gloo")
        engine = built(engines, folder, schedule="ZBV")
        with engine.eval_mode(), torch.no_grad():
            before = engine.forward_backward_batch(
                batch(calculate_entropy=True), None, forward_only=True
            )
        found: dict[str, Any] = {
            "outputs": before["model_output"],
            "source": engine.is_mp_src_rank_with_outputs(),
        }
        found["steps"] = steps(engine, 2)
        named, _ = engine.get_per_tensor_param()
        found["weights"] = {name: tensor.clone() for name, tensor in named}
        engine.save_checkpoint(str(folder / "checkpoint"), global_step=2)
        found["onward"] = steps(engine, 2)
        again = built(engines, folder, schedule="1F1B")
        again.load_checkpoint(str(folder / "checkpoint"))  # and leaves it there
        again.to("cpu")
        found["resumed"] = steps(again, 2)
        with pytest.raises(fpipe.errors.UnsupportedError, match="use_remove_padding=True"):
            again.forward_backward_batch(batch(use_remove_padding=False), None, True)
        if long:
            values = built(engines, folder, values=True, forward_only=True)
            found["values"] = values.forward_backward_batch(batch(), None, True)["model_output"]
        dist.destroy_process_group()
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, long: bool) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("verl")
    model().save_pretrained(folder / "model")
    model(values=True).save_pretrained(folder / "values")
    found = forked.launch(model, on_process, folder, long, ranks=2, timeout=100)
    return folder, sorted(found, key=lambda one: not one["source"])


def test_log_probs_and_entropies_are_those_of_the_model(ran: Any):
    _, (source, other) = ran
    whole = model().eval()
    with torch.no_grad():
        for row, expected in zip(
            source["outputs"]["log_probs"], log_probs(whole, batch()), strict=True
        ):
            torch.testing.assert_close(row[:-1], expected)
        for row, ids in zip(
            source["outputs"]["entropy"], batch()["input_ids"].unbind(), strict=True
        ):
            logits = whole(ids[None]).logits[0]
            torch.testing.assert_close(
                row, torch.distributions.Categorical(logits=logits).entropy()
            )
    assert other["outputs"] == {}


def trained(count: int) -> tuple[list[tuple[float, float]], nn.Module]:
    """Losses and gradient norms of the model without a pipeline, and the model then."""
    whole, found = model(), []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)
    scheduler = verl_stand_in.with_warmup(optimizer, 2)
    for _ in range(count):
        optimizer.zero_grad()
        loss = -torch.cat(log_probs(whole, batch())).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append((loss.item(), norm.item()))
    return found, whole


def test_steps_are_those_of_torch(ran: Any):
    _, (source, other) = ran
    expected, _ = trained(4)
    for ours, theirs in zip(source["steps"] + source["onward"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    assert not other["steps"]


def test_exported_weights_are_those_of_the_model_on_each_rank(ran: Any):
    _, parts = ran
    expected = copy.deepcopy(trained(2)[1]).state_dict()
    for part in parts:
        assert part["weights"].keys() == expected.keys()
        for name, tensor in part["weights"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    assert list(parts[0]["weights"]) == list(parts[1]["weights"])


def test_a_checkpoint_resumes_with_another_schedule(ran: Any):
    folder, parts = ran
    onward, resumed = (
        next(part[name] for part in parts if part[name]) for name in ("onward", "resumed")
    )
    for a, b in zip(onward, resumed, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint" / "huggingface")
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, parts[0]["weights"][name])


@pytest.mark.long
def test_values_of_a_value_model(ran: Any):
    _, parts = ran
    found = next(part["values"]["values"] for part in parts if part["values"])
    whole = model(values=True).eval()
    with torch.no_grad():
        for row, ids in zip(found, batch()["input_ids"].unbind(), strict=True):
            torch.testing.assert_close(row, whole(ids[None]).logits[0, :, 0])
