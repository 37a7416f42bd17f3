"""The `nccl` transport: vLLM's own packed NCCL broadcast, with our receipts around its engine side."""

from __future__ import annotations

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rlhf.weights.loading import ReceiptMixin


class VerifiedNCCLWeightTransferEngine(ReceiptMixin, NCCLWeightTransferEngine):
    """vLLM's NCCL engine side; start and finish are ours, `receive_weights` is vLLM's."""
