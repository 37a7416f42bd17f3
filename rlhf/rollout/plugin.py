"""What has to be registered inside vLLM's own processes.

vLLM runs its EngineCore (and the workers of a tensor-parallel engine) in child processes of its own, so a transport can
only get there through the entry-point group `vllm.general_plugins`, which names `register`.
"""

from __future__ import annotations

import os
from typing import Any

from rlhf.cluster.process import die_with_parent
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
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """Close an update that was never finished, because another engine or the sender failed."""
        self._weight_update_active = False

    def weight_receipt(self) -> dict[str, Any]:
        """Receipt of the last sync as this worker loaded it: checksum by name, and bytes."""
        receipt = self.weight_transfer_engine.receipt
        return {"checksums": receipt.checksums, "bytes": receipt.bytes}
