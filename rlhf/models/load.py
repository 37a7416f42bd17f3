"""Load a causal language model so that two passes over the same tokens give the same log-probs."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(path: str, dtype: str) -> Any:
    """Load the checkpoint at `path` (a folder or a hub name) in `dtype` ("float32" or "bfloat16"), on the CPU.

    Dropout is set to 0 wherever the configuration or a module has it, so that train and eval mode are equal, and what
    was changed is logged once. Nothing is cached between calls of the model. Under ZeRO stage 3 the caller keeps an
    `HfDeepSpeedConfig` alive around this call, and the parameters come back partitioned.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    changed = switch_dropout_off(config)
    config.use_cache = False
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            changed[f"module {name}"] = module.p
            module.p = 0.0
    if changed:
        listed = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        logger.warning("dropout switched off, log-probs have to be repeatable: %s in %s", listed, path)
    return model


def switch_dropout_off(config: Any, prefix: str = "") -> dict[str, float]:
    """Set every dropout probability of a transformers configuration to 0 and return the values that were not."""
    changed: dict[str, float] = {}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed.update(switch_dropout_off(value, f"{prefix}{name}."))
        elif _is_dropout(name) and isinstance(value, float) and value > 0:
            changed[prefix + name] = value
            setattr(config, name, 0.0)
    return changed


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith(("pdrop", "layerdrop", "drop_rate"))
