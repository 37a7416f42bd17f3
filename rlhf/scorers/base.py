"""What all scorers share: frozen models that only go forward, as a pool of ranks.

Invariants
- Not sharded, a rank has the whole model and scores the samples of its call alone; no rank waits for another.
- Sharded, every rank gets the same calls in the same order. Each scores its share of the samples by one plan, in
  equally many passes, and the union of the ranks' results is that of all samples. A rank that fails raises; the others
  may then wait for it in a gather, until the driver ends them or the process group's deadline does.
- A score doesn't depend on what is scored beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rlhf.batching import LearnerSample, fetch_columns
from rlhf.config.schema import Config
from rlhf.config.threads import threads, usable_cores
from rlhf.tracking.spans import Span, recorder, span
from rlhf.trajectories import Columns

if TYPE_CHECKING:
    from torch import nn

    from rlhf.models.arrangement import Arrangement, Batch

Score = TypeVar("Score")


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """A scorer's own part of the configuration; `role` names its spans and `deadline_s` is that of one call."""

    role: str
    dtype: str
    sharded: bool
    deadline_s: float


class Scorer(Generic[Score]):
    """One rank of a scorer. A subclass says how to load its model and what to read from a pass through it.

    The constructor loads nothing; `setup` does.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, device: Literal["cpu", "cuda"], settings: ScorerSettings
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._settings = settings
        self._model: Any = None
        self._arrangement: Arrangement | None = None

    def _load(self) -> nn.Module:
        """The model, on the CPU."""
        raise NotImplementedError

    def _evaluate(self, model: Any, batch: Batch, rows: Sequence[Columns]) -> Sequence[Score]:
        """Pass a batch through the model: one score for each of `rows`, which may be none."""
        raise NotImplementedError

    def setup(self, master: tuple[str, int] | None = None) -> str | None:
        """Load the model. Sharded, the ranks meet at `master` (address, port of rank 0) first: a collective call.

        Returns why its rows have to be padded, or None where they are packed.
        """
        from rlhf.models.arrangement import Arrangement
        from rlhf.models.distributed import set_up_compute

        count = threads(self._config, usable_cores())[self._settings.role]
        set_up_compute(self._device, self._config.run.deterministic, count)
        with span(f"{self._settings.role}/setup"):
            if self._settings.sharded:
                self._model = self._load_sharded(master)
            else:
                self._model = self._load().to(self._device).eval().requires_grad_(False)
            self._arrangement = Arrangement.of(getattr(self._model, "module", self._model))
        return self._arrangement.reason

    def _load_sharded(self, master: tuple[str, int] | None) -> Any:
        from rlhf.models.distributed import join_process_group, shard_for_inference

        if master is None:
            raise ValueError(f"the {self._settings.role} is sharded: its ranks need an address to meet at")
        join_process_group(self._rank, self._world_size, master, self._device, self._settings.deadline_s)
        return shard_for_inference(self._load, self._settings.dtype)

    def score(self, samples: Sequence[LearnerSample]) -> tuple[tuple[list[Span], list[str]], dict[str, Score]]:
        """Spans and sample ids, then the scores by sample id; sharded, those of this rank's share.

        Two return values: the driver reads the first and passes the other on. Raises `DeadlineExceeded` when columns
        don't arrive, and `ValueError` that names a sample whose columns contradict its header.
        """
        import torch

        assert self._arrangement is not None, "score before setup"
        ranks, rank = (self._world_size, self._rank) if self._settings.sharded else (1, 0)
        cap = self._config.policy.max_tokens_per_microbatch
        layout = self._arrangement.plan([s.length for s in samples], ranks, 1, cap)
        micro_batches = [micro_batch for part in layout.minibatches for micro_batch in part.ranks[rank]]
        mine = {sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids}
        scored: dict[str, Score] = {}
        with span(f"{self._settings.role}/score"), torch.no_grad():
            columns = fetch_columns([s for s in samples if s.sample_id in mine], self._settings.deadline_s)
            for micro_batch in micro_batches:
                rows = [columns[i] for i in micro_batch.sample_ids]
                batch = self._arrangement.batch(micro_batch, rows, self._device)
                scored.update(zip(micro_batch.sample_ids, self._evaluate(self._model, batch, rows), strict=True))
        return (recorder.drain(), list(scored)), scored

    def close(self) -> None:
        """Let go of the model, and leave the process group where there is one."""
        import torch.distributed

        self._model = None
        if self._settings.sharded and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
