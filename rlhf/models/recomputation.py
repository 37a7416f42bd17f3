"""Activation checkpointing: a layer keeps its input, and the backward pass computes the rest again.

Invariants
- Gradients are those without it, on packed rows and padded ones.
- Every layer is computed again, once a backward pass; a pass without gradients costs nothing more.
- A model that can't do that is refused.
- Nothing but what is computed again goes into training mode.
"""

from __future__ import annotations

from typing import Any


def recompute_activations(lm: Any) -> None:
    """Let a transformers model keep only the inputs of its layers; raises `ValueError` where it can't.

    Its layers ask their own `training` flag, and loaded models are in evaluation mode. There is no dropout whose random
    state would have to be kept (`rlhf.models.load`).
    """
    lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in lm.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
