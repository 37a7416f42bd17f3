"""Load transformers models so that two passes over the same tokens give the same result."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import nn

from rlhf.models.attention import PACKED_ATTENTION, register
from rlhf.models.backbone import ScalarHead

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Head = Literal["new", "checkpoint", "auto"]
# The head of every decoder's sequence-classification class in transformers. Encoders call theirs `classifier`; their
# attention looks at padding, which nothing here would hide from them.
SCORE_HEAD = "score"


def load_causal_lm(path: str, dtype: str) -> Any:
    """Load the checkpoint at `path` (a folder or a hub name) in `dtype` ("float32" or "bfloat16"), on the CPU.

    Dropout is set to 0 wherever the configuration or a module has it, so that train and eval mode are equal, and what
    was changed is logged once. Nothing is cached between calls of the model. Under ZeRO stage 3 the caller keeps an
    `HfDeepSpeedConfig` alive around this call, and the parameters come back partitioned. Raises `ValueError` when the
    checkpoint lacks weights of the model: transformers would make them up.
    """
    model, missing = _load("AutoModelForCausalLM", path, dtype)
    if missing:
        raise ValueError(f"{path} lacks {_listed(missing)}, which would be random. Give a complete checkpoint")
    return model


def load_classifier(path: str, dtype: str, head: Head) -> Any:
    """Load the checkpoint at `path` as a sequence-classification model whose `score` is a `ScalarHead`.

    "checkpoint" takes the head's weights from there and raises `ValueError` when there are none or it has more than
    one output; "new" takes a causal LM as well and makes a head of zeros, also where the checkpoint has one; "auto"
    takes the checkpoint's head where there is one. The rest is as in `load_causal_lm`.
    """
    model, missing = _load("AutoModelForSequenceClassification", path, dtype)
    linear = getattr(model, SCORE_HEAD, None)
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{path}: {type(model).__name__} has no `{SCORE_HEAD}` head. Give a decoder's sequence-classification model"
        )
    if head == "auto":
        head = "new" if f"{SCORE_HEAD}.weight" in missing else "checkpoint"
    if head == "new":
        missing = {name for name in missing if not name.startswith(f"{SCORE_HEAD}.")}
    if missing:
        raise ValueError(
            f"{path} lacks {_listed(missing)}, which would be random. Give a sequence-classification checkpoint that "
            f"has its head under `{SCORE_HEAD}.weight`"
        )
    if head == "new":
        model.score = ScalarHead.zeros(linear.in_features, DTYPES[dtype])
        model.config.num_labels = model.num_labels = 1
    elif linear.out_features == 1:
        model.score = ScalarHead(linear.weight, linear.bias)
    else:
        raise ValueError(
            f"{path} has num_labels {linear.out_features}: a score is one number. Give a model with num_labels 1"
        )
    return model


def _load(auto_class: str, path: str, dtype: str) -> tuple[Any, set[str]]:
    """A model without dropout, and the names of its weights that the checkpoint doesn't have."""
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    register()
    config = transformers.AutoConfig.from_pretrained(path)
    changed = switch_dropout_off(config)
    config.use_cache = False
    model, report = getattr(transformers, auto_class).from_pretrained(
        path, config=config, dtype=DTYPES[dtype], attn_implementation=PACKED_ATTENTION, output_loading_info=True
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            changed[f"module {name}"] = module.p
            module.p = 0.0
    _restore_rotary(model)
    if changed:
        listed = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        logger.warning("dropout switched off, log-probs have to be repeatable: %s in %s", listed, path)
    return model, set(report["missing_keys"])


def _restore_rotary(model: nn.Module) -> None:
    """Make rotary frequencies again where they are not in float32.

    Models are made under the compute dtype at ZeRO stage 3, and these buffers with them. In bfloat16 a frequency is off
    by up to 1/512 of itself, so at position 512 an angle may be off by a radian, and the engine's are not.
    """
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if "RotaryEmbedding" not in type(module).__name__ or all(b.dtype == torch.float32 for b in buffers.values()):
            continue
        fresh: Any = type(module)
        for name, buffer in fresh(module.config).named_buffers():
            setattr(module, name, buffer.to(buffers[name].device))


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


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
