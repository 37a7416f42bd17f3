"""Registers our transports in vLLM's factories, and builds the trainer side's init info for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

Transport = Literal["gloo", "nccl"]

# Names in vLLM's engine-side registry. NCCL's built-in name is taken, and ours adds the receipts.
ENGINE_BACKENDS: dict[Transport, str] = {"gloo": "gloo", "nccl": "rlhf_nccl"}


def register_transports() -> None:
    """Make our transports known to vLLM in this process; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    engine_side = {
        "gloo": ("rlhf.weights.gloo", "GlooWeightTransferEngine"),
        "rlhf_nccl": ("rlhf.weights.nccl", "VerifiedNCCLWeightTransferEngine"),
    }
    for name, (module, cls) in engine_side.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, module, cls)
    if "gloo" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine("gloo", "rlhf.weights.gloo", "GlooTrainerWeightTransferEngine")


def trainer_init_info(
    transport: Transport,
    *,
    rank: int,
    address: str,
    port: int,
    world_size: int,
    bucket_bytes: int,
    timeout_s: float,
) -> TrainerInitInfo:
    """Trainer-side init info of the transport; vLLM's trainer factory dispatches on its type."""
    if transport == "gloo":
        from rlhf.weights.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(
            master_address=address,
            master_port=port,
            world_size=world_size,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            rank=rank,
        )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=address,
        master_port=port,
        world_size=world_size,
        packed_buffer_size_bytes=bucket_bytes,
        rank=rank,
    )
