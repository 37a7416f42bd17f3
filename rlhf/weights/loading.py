"""The engine side that every transport shares: layerwise loading that survives a failed sync, with receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from rlhf.tracking.spans import now
from rlhf.weights.endpoint import Declared
from rlhf.weights.receipts import Receipt, SyncError
from rlhf.weights.recording import recorded_loading

PARTS = ("receive", "checksum", "load")


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

    A layer that was completed counts no more. Padded vocabularies never get all: for these any
    value is enough, the receipt has the rest.
    """
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not any(p is not None for p in layer._parameters.values()):
            continue
        padded = hasattr(layer, "org_vocab_size")
        enough = 1 if padded else info.load_numel_total
        if not is_deferred_attention_layer(layer) and info.load_numel < enough:
            names.append(f"{name} ({info.load_numel} of {info.load_numel_total} values)")
    return names


class _NothingToCopy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it a copy from a tensor without values changes nothing; vLLM's own mode, within this one, counts it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # vLLM leaves biases where they are, with values.
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def disagreement(model: Any, declared: Sequence[Declared], dtype: torch.dtype) -> str | None:
    """What speaks against loading the declared tensors into this model, or None; the model stays as it is.

    The model's own `load_weights` is given tensors of these names and shapes that have no values, and layers count
    what they would get: an unknown name, a wrong shape, and a layer that would be left without some of its values are
    found before anything is sent.
    """
    foreign = sorted(d.name for d in declared if d.dtype != str(dtype).removeprefix("torch."))
    if foreign:
        return f"{len(foreign)} tensors are not declared in the engine's dtype {dtype} ({', '.join(foreign[:5])})"
    initialize_layerwise_reload(model)
    process = layerwise._layerwise_process
    # A complete layer would now be filled with what was loaded, and there is nothing.
    layerwise._layerwise_process = lambda layer, info: None
    try:
        for d in declared:
            with _NothingToCopy():  # type: ignore[no-untyped-call]
                model.load_weights([(d.name, torch.empty(d.shape, dtype=dtype, device="meta"))])
        incomplete = incomplete_layers(model)
    except Exception as error:
        return f"{d.name} {list(d.shape)} can't be loaded: {type(error).__name__}: {error}"
    finally:
        layerwise._layerwise_process = process
        reset_half_loaded_layers(model)
    return (
        f"{len(incomplete)} layer(s) would not get all their values: {', '.join(incomplete[:5])}"
        if incomplete
        else None
    )


class ReceiptMixin(WeightTransferEngine):
    """Layerwise reload with a receipt, around any transport's `receive_weights`.

    Mixed in before the transport's class. A sync is start, one update with everything, finish; its receipt is read by
    `rlhf.rollout.plugin.WorkerExtension.weight_receipt`.
    """

    receipt: Receipt
    seconds: dict[str, float]
    # Checksums that the transport took already, by name.
    checked: dict[str, int]

    def start_weight_update(self) -> None:
        """Begin a sync: forget a failed one, and count from zero."""
        reset_half_loaded_layers(self.model)
        self.receipt = Receipt()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.checked = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load the tensors that `update_info` declares, leaving a receipt of each.

        Raises `SyncError` when a layer is left without some of its values: vLLM itself would fill them with whatever
        the memory holds. Raised here and not at the finish, since vLLM ends an update that fails here.
        """
        start = now()
        with recorded_loading(self.model, self.receipt, self.seconds, self.checked):
            super().update_weights(update_info)
        self.seconds["receive"] = now() - start - self.seconds["load"] - self.seconds["checksum"]
        incomplete = incomplete_layers(self.model)
        if incomplete:
            listed = ", ".join(incomplete[:5])
            raise SyncError(f"weight sync: {len(incomplete)} layer(s) did not get all their values: {listed}")

    def finish_weight_update(self) -> None:
        """Complete the sync."""
        start = now()
        finalize_layerwise_reload(self.model, self.model_config)
        self.seconds["load"] += now() - start
