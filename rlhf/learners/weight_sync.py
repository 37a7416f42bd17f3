"""The learner's part in the weight sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.schema import Config
from rlhf.weights.endpoint import Endpoint, SendReport

if TYPE_CHECKING:
    from rlhf.weights.sender import WeightSender


class WeightSyncMixin:
    """Gives a learner `join_transfer` and `send_weights`; it has to be a `rlhf.weights.source.WeightHolder` itself."""

    _config: Config
    _rank: int
    _sender: WeightSender | None = None

    def join_transfer(self, endpoint: Endpoint) -> None:
        """Join the transfer group with the engines. Called once on every rank, again after engines changed."""
        import torch

        from rlhf.weights.sender import WeightSender
        from rlhf.weights.source import LearnerSource

        if self._sender is not None:
            self._sender.close()
        source = LearnerSource(self, getattr(torch, self._config.model.dtype))  # type: ignore[arg-type]
        self._sender = WeightSender(source, endpoint, self._rank)

    def send_weights(self) -> SendReport:
        """Send the current weights to the engines of the endpoint. Called on every rank together."""
        if self._sender is None:
            raise RuntimeError("send_weights before join_transfer")
        return self._sender.send()
