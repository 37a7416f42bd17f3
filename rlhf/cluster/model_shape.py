"""The shape of a model, read from its `config.json`: enough to count bytes and to check that heads divide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.config.catalogue import needs_critic
from rlhf.config.schema import Config

# What the families leave out of config.json because it is their class default.
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")
_QKV_BIAS = ("qwen2",)
_QK_NORM = ("qwen3", "gemma3", "gemma3_text")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnknownShape(ValueError):
    """A model whose shape can't be read. The message names the file, what is missing and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs (Llama, Qwen2, Qwen3, Gemma and their like)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: q, k, v and output projections, gate, up and down projections, norms."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (query + 2 * keys) + query * self.hidden
        attention += (query + 2 * keys) * self.qkv_bias + self.hidden * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias
        return attention + mlp + self.norms_per_layer * self.hidden

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's projections, under their usual names."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; an untied head has as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied embedding counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @classmethod
    def from_path(cls, path: str | Path) -> ModelShape:
        """Read the shape of a model folder, or of a hub name through transformers.

        Raises `UnknownShape` when there is no readable configuration, or for an architecture that isn't covered.
        """
        folder = Path(path)
        if folder.is_dir():
            return cls.from_config(_read(folder / "config.json"), str(folder / "config.json"))
        if folder.is_absolute() or str(path).startswith(".") or len(folder.parts) > 2:
            raise UnknownShape(
                f"model.path = {str(path)!r}: no such folder. Give the folder of a Hugging Face causal LM"
            )
        return cls.from_config(_from_hub(str(path)), f"configuration of {path}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], place: str) -> ModelShape:
        """Read the shape from the contents of a `config.json`; `place` names it in errors."""
        config = config.get("text_config") or config
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise UnknownShape(f"{place}: no whole number under {', '.join(missing)}. Give a decoder-only causal LM")
        experts = next((key for key in _EXPERTS if (config.get(key) or 1) > 1), None)
        if experts is not None:
            raise UnknownShape(
                f"{place}: {experts} = {config[experts]}: mixture-of-experts models can't be placed. Give a dense model"
            )
        family = str(config.get("model_type", ""))
        heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)),
            qkv_bias=attention_bias or family in _QKV_BIAS,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family in _QK_NORM,
            norms_per_layer=4 if family in _FOUR_NORMS else 2,
        )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise UnknownShape(
            f"{file}: no such file. model.path must be the folder of a Hugging Face causal LM (with a config.json)"
        ) from None
    except (OSError, ValueError) as error:
        raise UnknownShape(f"{file}: can't be read: {error}. Save the model again") from None
    if not isinstance(content, dict):
        raise UnknownShape(f"{file}: holds {type(content).__name__}, not an object. Save the model again")
    return content


def _from_hub(name: str) -> Mapping[str, Any]:
    from transformers import AutoConfig

    try:
        config: Mapping[str, Any] = AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise UnknownShape(
            f"model.path = {name!r}: neither a folder nor a model that the hub (or its local cache) has: "
            f"{str(error).splitlines()[0]}. Give the folder of a downloaded model"
        ) from None
    return config


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Shapes of a run's models; those of critic and reward model only where they have a checkpoint of their own."""

    policy: ModelShape
    critic: ModelShape | None = None
    reward: ModelShape | None = None

    @classmethod
    def of(cls, config: Config) -> ModelShapes:
        """Read them from the checkpoints that the configuration names. Raises `UnknownShape`."""
        critic, reward = config.critic.model, config.reward.model
        own_critic = needs_critic(config) and critic not in ("policy", "reward")
        reward_shape = ModelShape.from_path(reward.path) if reward is not None else None
        critic_shape = ModelShape.from_path(critic) if own_critic else reward_shape if critic == "reward" else None
        return cls(ModelShape.from_path(config.model.path), critic_shape, reward_shape)
