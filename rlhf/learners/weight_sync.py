"""The learner's part in the weight sync."""

from __future__ import annotations

import torch

from rlhf.config.schema import Config
from rlhf.weights.sender import Endpoint, SendReport, WeightSender
from rlhf.weights.source import LearnerSource, WeightHolder


class WeightSyncMixin(WeightHolder):
    """Gives a learner `join_transfer` and `send_weights`; it has to be a `WeightHolder` itself."""

    _config: Config
    _rank: int
    _sender: WeightSender | None = None

    def join_transfer(self, endpoint: Endpoint) -> None:
        """Join the transfer group with the engines. Called once on every rank, again after engines changed."""
        if self._sender is not None:
            self._sender.close()
        source = LearnerSource(self, getattr(torch, self._config.model.dtype))
        self._sender = WeightSender(source, endpoint, self._rank)

    def send_weights(self) -> SendReport:
        """Send the current weights to the engines of the endpoint. Called on every rank together."""
        if self._sender is None:
            raise RuntimeError("send_weights before join_transfer")
        return self._sender.send()
