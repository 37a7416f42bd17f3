"""What has to be registered inside vLLM's own processes.

vLLM runs its EngineCore (and the workers of a tensor-parallel engine) in child processes of its own, so a transport can
only get there through the entry-point group `vllm.general_plugins`, which names `register`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rlhf.cluster.process import die_with_parent
from rlhf.weights.endpoint import Declared
from rlhf.weights.transports import register_transports

# Set by the engine actor for its children; vLLM processes of other programs on the same machine don't have it.
ACTOR_PID_VARIABLE = "RLHF_ENGINE_ACTOR_PID"


def register() -> None:
    """Register our transports, and tie the engine's child processes to the life of the actor that started them."""
    register_transports()
    actor_pid = os.environ.get(ACTOR_PID_VARIABLE)
    if actor_pid is not None and int(actor_pid) != os.getpid():
        # vLLM 0.32 doesn't watch for its parent's death at tensor parallel 1: `kill -9` of the actor would leave an
        # EngineCore behind that holds memory and devices.
        die_with_parent()


class WorkerExtension:
    """Methods that vLLM adds to each engine worker; called through `collective_rpc`."""

    weight_transfer_engine: Any
    model_config: Any
    vllm_config: Any
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Close an update that was never finished, because another engine or the sender failed."""
        self._weight_update_active = False

    def weight_disagreement(self, declared: Sequence[tuple[str, str, Sequence[int]]]) -> str | None:
        """What speaks against loading tensors of these names, dtypes and shapes; None when nothing does."""
        from vllm.config import set_current_vllm_config

        from rlhf.weights.loading import disagreement

        with set_current_vllm_config(self.vllm_config):
            tensors = [Declared(name, dtype, tuple(shape)) for name, dtype, shape in declared]
            return disagreement(self.weight_transfer_engine.model, tensors, self.model_config.dtype)

    def weight_receipt(self) -> dict[str, Any]:
        """Receipt of the last sync as this worker loaded it: checksum by name, bytes, and seconds by part."""
        engine = self.weight_transfer_engine
        return {"checksums": engine.receipt.checksums, "bytes": engine.receipt.bytes, "seconds": engine.seconds}

    def leave_transfer(self) -> None:
        """Leave the transfer group."""
        self.weight_transfer_engine.shutdown()
