"""The reference scorer: a frozen copy of the policy's starting point that only goes forward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from rlhf.batching import LearnerSample, ScoredColumns, fetch_columns, plan
from rlhf.config.schema import Config
from rlhf.tracking.spans import Span, recorder, span


class ReferenceScorer:
    """One replica; each call scores whole samples and needs no other replica."""

    def __init__(self, config: Config, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self._config = config
        self._device = device
        self._model: Any = None

    def setup(self) -> None:
        """Load the checkpoint in the run's dtype."""
        import torch

        from rlhf.models.load import load_causal_lm
        from rlhf.models.policy import PolicyModel

        if self._device == "cpu":
            cores = len(os.sched_getaffinity(0))
            deterministic = self._config.run.deterministic
            torch.set_num_threads(1 if deterministic else max(1, cores // self._config.reference.ranks))
            torch.use_deterministic_algorithms(deterministic)
        lm = load_causal_lm(self._config.model.path, self._config.model.dtype)
        self._model = PolicyModel(lm.to(self._device)).eval().requires_grad_(False)

    def logprobs(self, samples: Sequence[LearnerSample]) -> ScoredColumns:
        """Log-probs of the response tokens at the sampling temperature: float32 [T] by sample id, NaN elsewhere."""
        import torch

        from rlhf.models.batch import pad_batch, unflatten

        deadline_s = self._config.placement.deadline_s
        scored: ScoredColumns = {}
        with span("reference/logprobs"), torch.no_grad():
            columns = fetch_columns(samples, deadline_s)
            layout = plan([s.length for s in samples], 1, 1, self._config.policy.max_tokens_per_microbatch)
            for minibatch in layout.minibatches:
                for micro_batch in minibatch.ranks[0]:
                    rows = [columns[i] for i in micro_batch.sample_ids]
                    batch = pad_batch(rows, self._device)
                    logprobs, _ = self._model(batch, self._config.rollout.sampling.temperature)
                    scored.update(zip(micro_batch.sample_ids, unflatten(rows, logprobs), strict=True))
        return scored

    def score(self, samples: Sequence[LearnerSample]) -> tuple[list[Span], ScoredColumns]:
        """`logprobs`, with the spans as a first value: the driver reads these and passes the other on."""
        scored = self.logprobs(samples)
        return recorder.drain(), scored

    def close(self) -> None:
        """Let go of the model."""
        self._model = None
