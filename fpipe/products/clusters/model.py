# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, read from the config.json of a model of Hugging Face. Knows no hardware
and no layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any

from ...actions import read_bytes
from ...errors import PlanError

MOST = 4 << 20  #: bytes of a config.json
MOST_LAYERS = 256  #: with more, a search of layouts takes more than a minute
MOST_SIZE = 1 << 32  #: of any other size
#: By ``model_type`` what a kind has beside others: ``plain`` ones have learned positions, layer
#: norms, biases and a feed-forward of two matrices; all others have a gated feed-forward, rotary
#: positions and RMS norms. ``biased`` are the projections of queries, keys and values; ``normed``
#: are queries and keys.
KINDS = {
    "gpt2": "plain",
    "llama": "",
    "mistral": "",
    "qwen2": "biased",
    "qwen3": "normed",
    "mixtral": "",
    "qwen2_moe": "biased",
    "qwen3_moe": "normed",
    "gemma": "",
    "granite": "",
    "olmo2": "",
    "phi3": "",
}


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder whose layers are alike.

    Args:
        name: for people.
        kind: ``model_type`` of its config.json.
        hidden: the width of a token between layers.
        layers: how many there are.
        heads: of attention, for queries.
        vocabulary: the number of tokens.
        feed_forward: the width inside a feed-forward, of each expert where there are experts.
        kv_heads: heads of keys and values.
        head_dim: the width of a head.
        gated: whether a feed-forward has three matrices, not two.
        experts: how many feed-forwards a layer has to choose from; 0: one, which is always used.
        active: how many of them a token uses.
        shared: the width of a feed-forward beside the experts, which every token uses.
        tied: whether the head is the embedding's matrix.
        positions: learned positions; 0: none.
        dropout: whether residuals are dropped out.

    >>> model = Model("tiny", "llama", hidden=8, layers=2, heads=2, vocabulary=16, feed_forward=32)
    >>> model.head_dim, model.parameters
    (4, 2344)
    """

    name: str
    kind: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    feed_forward: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    experts: int = 0
    active: int = 1
    shared: int = 0
    tied: bool = False
    positions: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.default == 0 else 1
            high = MOST_LAYERS if field.name == "layers" else MOST_SIZE
            if field.type == "int" and (type(value) is not int or not low <= value <= high):
                raise PlanError(
                    f"{self.name!s:.60}: {field.name} is {value!r:.60}, and must be a whole number "
                    f"from {low} to {high}; correct it"
                )
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        rules = {
            f"{self.heads} heads must divide hidden {self.hidden}, or head_dim is given": (
                self.head_dim or self.hidden % self.heads == 0
            ),
            f"{self.kv_heads} kv_heads must divide {self.heads} heads": self.heads % self.kv_heads
            == 0,
            f"{self.active} active of {self.experts} experts are too many": not self.experts
            or self.active <= self.experts,
        }
        for rule, holds in rules.items():
            if not holds:
                raise PlanError(f"{self.name!s:.60}: {rule}; correct it")
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    # ---- parameters ----
    @property
    def queries(self) -> int:
        """The width of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def inner(self) -> int:
        """The width inside the feed-forwards that a token uses."""
        return (self.active if self.experts else 1) * self.feed_forward + self.shared

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.gated else 2

    @property
    def _expert(self) -> int:
        """Elements of the matrices of a feed-forward, of each expert where there are experts."""
        return self.matrices * self.hidden * self.feed_forward

    @cached_property
    def layer_matrices(self) -> int:
        """Elements of the matrices in a layer."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        router = self.hidden * self.experts
        shared = self.hidden * self.matrices * self.shared
        if self.shared:
            shared += self.hidden  # its gate
        return attention + max(self.experts, 1) * self._expert + shared + router

    @cached_property
    def layer_parameters(self) -> int:
        """Elements of a layer."""
        vectors = {"biased": self.queries + 2 * self.keys, "normed": 2 * self.head_dim}
        vectors["plain"] = vectors["biased"] + 4 * self.hidden + self.feed_forward
        return self.layer_matrices + 2 * self.hidden + vectors.get(self._traits, 0)

    @property
    def _traits(self) -> str:
        return KINDS.get(self.kind, "")

    @property
    def embedding_parameters(self) -> int:
        """Elements of the first stage beside its layers."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Elements of the last stage beside its layers; a tied head is a copy of the embedding
        there.
        """
        return self.vocabulary * self.hidden + self._last_norm

    @property
    def _last_norm(self) -> int:
        return self.hidden * (2 if self._traits == "plain" else 1)

    @property
    def parameters(self) -> int:
        """All parameters, a tied matrix once."""
        head = self._last_norm if self.tied else self.head_parameters
        return self.layers * self.layer_parameters + self.embedding_parameters + head

    @property
    def active_matrices(self) -> int:
        """Elements of the matrices of a layer that multiply a token."""
        idle = max(self.experts - self.active, 0)
        return self.layer_matrices - idle * self._expert


def read_model(path: str | PathLike[str]) -> Model:
    """The sizes in a config.json.

    Args:
        path: of the file.

    Returns:
        The sizes.

    Raises:
        PlanError: if the file is no config of a known kind, or lacks a size.
        OSError: if it cannot be read.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "config.json")
    >>> sizes = '"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257'
    >>> _ = path.write_text('{"model_type": "gpt2", ' + sizes + "}")
    >>> read_model(path).parameters
    124439808
    """
    try:
        config = json.loads(read_bytes(path, MOST))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: {error}; give the config.json of a model") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds no JSON object; give the config.json of a model")
    inner = config.get("text_config")
    return model_of(inner if isinstance(inner, dict) else config, str(path))


def model_of(config: Mapping[str, Any], where: str = "the config") -> Model:
    """The sizes in the content of a config.json; ``where`` it is from.

    >>> model_of({"model_type": "llama"})
    Traceback (most recent call last):
    ...
    fpipe.errors.PlanError: the config lacks 'hidden_size'; add it
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(
            f"{where}: model_type is {kind!r:.60}, and known are {', '.join(KINDS)}; give the "
            "nearest of them"
        )
    for name, usual in (
        ("mlp_only_layers", []),
        ("first_k_dense_replace", 0),
        ("decoder_sparse_step", 1),
    ):
        value = config.get(name) or usual
        if value != usual:
            raise PlanError(
                f"{where}: {name} is {value!r:.60}, and all layers must be alike; leave it out"
            )
    plain = KINDS[kind] == "plain"

    def size(*names: str, default: int | None = None) -> int:
        """A size by any of its names, that of the kind last where it is a plain one."""
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise PlanError(f"{where} lacks {names[-1 if plain else 0]!r}; add it")
        return value

    hidden = size("hidden_size", "n_embd")
    layers = size("num_hidden_layers", "n_layer")
    width = size("intermediate_size", "n_inner", default=4 * hidden if plain else None)
    experts = size("num_local_experts", "num_experts", default=0)
    sizes: dict[str, Any] = {"feed_forward": width}
    if experts:
        sizes = {
            "feed_forward": config.get("moe_intermediate_size", width),
            "experts": experts,
            "active": config.get("num_experts_per_tok", 1),
            "shared": config.get("shared_expert_intermediate_size", 0),
        }
    if plain:
        sizes["gated"] = False
        sizes["positions"] = config.get("n_positions", 1024)
        sizes["dropout"] = bool(config.get("resid_pdrop", 0.1))
    return Model(
        f"{kind} {hidden}x{layers}",
        kind,
        hidden,
        layers,
        heads=size("num_attention_heads", "n_head"),
        vocabulary=size("vocab_size"),
        kv_heads=size("num_key_value_heads", default=0),
        head_dim=config.get("head_dim") or 0,
        tied=bool(config.get("tie_word_embeddings", plain)),
        **sizes,
    )
