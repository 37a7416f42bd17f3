"""The engine side that every transport shares: layerwise loading that survives a failed sync, with receipts."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from rlhf.weights.receipts import Receipt, SyncError
from rlhf.weights.recording import recorded_loading


def reset_half_loaded_layers(model: Any) -> int:
    """Put the old weights back into layers that a failed update left half loaded; returns how many there were.

    vLLM's layerwise loader keeps counting where a failed update stopped, so the next complete one would fail too.
    """
    restored = 0
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
            restored += 1
    return restored


def incomplete_layers(model: Any) -> list[str]:
    """Names of layers with parameters that an update left without some of their values.

    A layer that got everything was completed, and counts no more. Padded vocabularies never get all: for these any
    value is enough, the receipt has the rest.
    """
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not any(p is not None for p in layer._parameters.values()):
            continue
        padded = hasattr(layer, "org_vocab_size")
        if not is_deferred_attention_layer(layer) and not (padded and info.load_numel > 0):
            names.append(f"{name} ({info.load_numel} of {info.load_numel_total} values)")
    return names


class ReceiptMixin(WeightTransferEngine):
    """Layerwise reload with a receipt, around any transport's `receive_weights`.

    Mixed in before the transport's class. A sync is start, one update with everything, finish; its receipt is read by
    `rlhf.rollout.plugin.WorkerExtension.weight_receipt`.
    """

    receipt: Receipt

    def start_weight_update(self) -> None:
        """Begin a sync: forget a failed one, and count from zero."""
        reset_half_loaded_layers(self.model)
        self.receipt = Receipt()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load the tensors that `update_info` declares, leaving a receipt of each.

        Raises `SyncError` when a layer is left without some of its values: vLLM itself would fill them with whatever
        the memory holds. Raised here and not at the finish, since vLLM ends an update that fails here.
        """
        with recorded_loading(self.model, self.receipt):
            super().update_weights(update_info)
        incomplete = incomplete_layers(self.model)
        if incomplete:
            listed = ", ".join(incomplete[:5])
            raise SyncError(f"weight sync: {len(incomplete)} layer(s) did not get all their values: {listed}")

    def finish_weight_update(self) -> None:
        """Complete the sync."""
        finalize_layerwise_reload(self.model, self.model_config)
