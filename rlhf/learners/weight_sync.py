"""The learner's part in the weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.learners.learner import Learner
from rlhf.weights.endpoint import Endpoint, JoinReport, SendReport

if TYPE_CHECKING:
    from rlhf.weights.sender import WeightSender


class WeightSyncMixin(Learner):
    """Gives a learner transfer groups; it has to be a `rlhf.weights.source.WeightHolder` itself.

    What is sent carries the version that the learner knows, so that a transfer which had to wait for an update can't be
    mislabelled.
    """

    _sender: WeightSender | None = None

    def join_transfer(self, endpoint: Endpoint) -> JoinReport:
        """Join a transfer group with engines. Called on every rank together."""
        import torch

        from rlhf.weights.sender import WeightSender

        if self._sender is None:
            self._sender = WeightSender(
                self,  # type: ignore[arg-type]
                getattr(torch, self._config.model.dtype),
                endpoint.transport,
                endpoint.bucket_bytes,
                self._rank,
            )
        return self._sender.join(endpoint)

    def leave_transfer(self, epoch: int) -> None:
        """Leave a transfer group. Called on every rank together."""
        if self._sender is not None:
            self._sender.leave(epoch)

    def send_weights(self, epochs: Sequence[int]) -> SendReport:
        """Send the current weights to these groups. Called on every rank together."""
        if self._sender is None:
            raise RuntimeError("send_weights before join_transfer")
        return self._sender.send(epochs, self._version)
