"""What every learner does: join its ranks, load its model, try the largest micro-batch, update, score."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.batching import LearnerSample, ScoredColumns
from rlhf.config.schema import Config, LearnerConfig
from rlhf.config.threads import threads, usable_cores
from rlhf.tracking.spans import Span, recorder, span

if TYPE_CHECKING:
    from torch import nn

    from rlhf.learners.checkpoint import LearnerCheckpoint, LoadReport, OnWorldSizeChange, SaveReport
    from rlhf.learners.ranks import Ranks
    from rlhf.learners.snapshot import WriteReport
    from rlhf.learners.update import UpdateLoop
    from rlhf.learners.zero import ZeroEngine


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Metrics of an update, equal on all ranks, and the spans that this rank recorded since the last result."""

    metrics: dict[str, float]
    spans: list[Span]


class Learner(ABC):
    """One rank of a learner, in a process of its own. Its methods are collective: call them on every rank.

    The constructor does nothing that can fail; `setup` does. `own` holds functions of the user's, as
    `rlhf.algorithms.registry.dump_own` gives them.
    """

    role: ClassVar[str]

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        device: Literal["cpu", "cuda"] = "cpu",
        own: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._own = dict(own or {})
        self._ranks: Ranks
        self._zero: ZeroEngine
        self._update: UpdateLoop
        self._checkpoint: LearnerCheckpoint
        self._disk: Path | None = None
        self._version = 0

    @property
    @abstractmethod
    def settings(self) -> LearnerConfig:
        """This learner's section of the configuration."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Load the model."""

    @abstractmethod
    def make_update(self) -> UpdateLoop:
        """The update loop over the loaded model."""

    def setup(self, master: tuple[str, int]) -> str | None:
        """Join the process group, whose rank 0 listens at `master` (address, port), and load the model.

        Returns why its rows have to be padded, or None where they are packed.
        """
        import torch

        from rlhf.learners.offload import make_folder
        from rlhf.learners.ranks import Ranks
        from rlhf.learners.zero import ZeroEngine
        from rlhf.models.distributed import join_process_group, seed_random_streams, set_up_compute
        from rlhf.models.sequence import join_sequence_group

        count = threads(self._config, usable_cores())[self.role]
        set_up_compute(self._device, self._config.run.deterministic, count)
        # One stream for ranks that share rows: their losses have to be the same, also one of the user's that draws.
        seed_random_streams(self._config.run.seed, self.role, self._rank // self.settings.sequence_parallel)
        with span(f"{self.role}/setup"):
            settings, place = self.settings, (self._rank, self._world_size)
            join_process_group(*place, master, self._device, settings.deadline_s)
            sequence = join_sequence_group(*place, settings.sequence_parallel, settings.deadline_s)
            device = torch.device(self._device)
            self._ranks = Ranks(*place, device, sequence)
            if settings.offload_to == "disk":
                with self._ranks.together(f"offloading the optimizer's state of the {self.role} to a disk"):
                    self._disk = make_folder()
            dtype = self._config.model.dtype
            self._zero = ZeroEngine(settings, dtype, self._world_size, device, self._load, sequence, self._disk)
        # Not before DeepSpeed has been told its device.
        from rlhf.learners.checkpoint import LearnerCheckpoint

        self._checkpoint = LearnerCheckpoint(self.role, self._config.model.dtype, self._zero, self._ranks)
        self._update = self.make_update()
        return self._zero.arrangement.reason

    def _load(self) -> nn.Module:
        """The model as the run begins with it."""
        module, start = self.build(), self._config.checkpoint.init_from
        if self.settings.activation_checkpointing:
            from rlhf.models.recomputation import recompute_activations

            recompute_activations(module.lm)
        if start is not None:
            from rlhf.learners.initial import load_initial_weights

            load_initial_weights(module, start / self.role, self.settings.zero_stage)
        return module

    def dry_run(self) -> None:
        """Run the largest micro-batch with the longest sequences forward and backward, and discard the gradients.

        What can't fit fails here, before step 1, and not when such a batch first comes up.
        """
        config = self._config
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
        group = config.rollout.samples_per_prompt
        samples = -(-config.rollout.prompts_per_step * group // self._ranks.data_ranks)
        cap = self.settings.max_tokens_per_microbatch
        with span(f"{self.role}/dry_run"):
            with self._ranks.together(
                f"the largest micro-batch of this run, samples of {prompt + response} tokens in at most {cap},"
            ):
                batch = self._zero.arrangement.largest(cap, prompt, response, samples, group, self._ranks.device)
                predicted = self._update.predict(batch)
            self._zero.backward(predicted.sum() * 0.0, last=True)
            self._zero.discard_gradients()

    def update(self, step: int, samples: Sequence[LearnerSample]) -> UpdateResult:
        """Train on `samples`; every rank gets all headers and fetches the columns of its own share.

        Raises `LearnerError` on every rank when it failed on any, with the samples concerned; the optimizer step in
        which that happened was not applied.
        """
        with span(f"{self.role}/update", step):
            metrics = self._update.run(step, samples)
        self._version = step
        return UpdateResult(metrics, recorder.drain())

    def score(self, samples: Sequence[LearnerSample]) -> tuple[tuple[list[Span], list[str]], ScoredColumns]:
        """What the model says of this rank's share of the samples under the current weights.

        Two return values, the second a `ScoredColumns`: the driver reads the first (the spans, and which samples these
        are) and passes the other on.
        """
        with span(f"{self.role}/score"):
            scored = self._update.score(samples)
        return (recorder.drain(), list(scored)), scored

    def save(self, path: str) -> SaveReport:
        """Begin to write this rank's state, as it is now, into the folder `path`; `finish_save` waits for that.

        Training may go on at once: an optimizer step waits until the state is copied. A second save waits for the
        first, and raises `LearnerError` when that failed.
        """
        with span(f"{self.role}/save"):
            return self._checkpoint.save(Path(path), self.state_dict())

    def finish_save(self) -> WriteReport:
        """Wait until this rank's part of the last save is on the disk, while its other methods compute.

        Not collective: call it on every rank, beside their work. Raises what writing raised; training can go on.
        """
        return self._checkpoint.finish()

    def load(self, path: str, on_world_size_change: OnWorldSizeChange = "error") -> LoadReport:
        """Go on from what `save` wrote to the folder `path`, whose manifest has to be verified before.

        (DeepSpeed unpickles its shards, which can run any code.) A checkpoint of another number of ranks is converted
        or refused. Raises `LearnerError` when it doesn't fit this learner.
        """
        with span(f"{self.role}/load"):
            report, state = self._checkpoint.load(Path(path), on_world_size_change)
            self.load_state_dict(state)
        return report

    def state_dict(self) -> dict[str, Any]:
        """What this learner knows besides its engine's state, JSON values: `version`, the step of its last update."""
        return {"version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._version = state["version"]

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine."""
        return self._zero.deepspeed

    def close(self) -> None:
        """Leave the process group, and remove what was offloaded to a disk."""
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)
