"""Registers our transports in vLLM's engine-side factory."""

from __future__ import annotations

from typing import Literal

Transport = Literal["gloo", "nccl"]

# Names in vLLM's engine-side registry. NCCL's built-in name is taken, and ours adds the receipts.
ENGINE_BACKENDS: dict[Transport, str] = {"gloo": "gloo", "nccl": "rlhf_nccl"}


def register_transports() -> None:
    """Make our transports known to vLLM in this process; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    engine_side = {
        "gloo": ("rlhf.weights.gloo", "GlooWeightTransferEngine"),
        "rlhf_nccl": ("rlhf.weights.nccl", "VerifiedNCCLWeightTransferEngine"),
    }
    for name, (module, cls) in engine_side.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, cls)
