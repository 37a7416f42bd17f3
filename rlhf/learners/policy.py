"""The policy learner: trains the policy, estimates advantages, and is the source of the weights that engines serve."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.batching import LearnerSample, RewardedSample, ScoredColumns
from rlhf.config.schema import PolicyConfig
from rlhf.learners.learner import Learner, UpdateResult
from rlhf.learners.weight_sync import WeightSyncMixin
from rlhf.tracking.spans import Span, recorder, span

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf.learners.policy_update import PolicyUpdate
    from rlhf.models.lora import Adapters


class PolicyLearner(WeightSyncMixin, Learner):
    """One rank of the policy. `score` gives the log-prob of each response token at the sampling temperature."""

    role = "policy"
    _update: PolicyUpdate

    @property
    def settings(self) -> PolicyConfig:
        return self._config.policy

    def build(self) -> nn.Module:
        from rlhf.models.load import load_causal_lm
        from rlhf.models.lora import add_adapters
        from rlhf.models.policy import PolicyModel

        lm = load_causal_lm(self._config.model.path, self._config.model.dtype)
        if self.settings.lora is not None:
            add_adapters(lm, self.settings.lora, self._config.run.seed)
        return PolicyModel(lm)

    def make_update(self) -> PolicyUpdate:
        from rlhf.learners.policy_update import PolicyUpdate

        return PolicyUpdate(self._config, self._zero, self._ranks, self._load_own("loss"))

    def _load_own(self, name: str) -> Any | None:
        from rlhf.algorithms.registry import load_own

        return load_own(self._own[name]) if name in self._own else None

    def update(self, step: int, samples: Sequence[LearnerSample], kl_coefficient: float | None = None) -> UpdateResult:
        """`Learner.update`, with the KL coefficient of this step (default: the configured one)."""
        if kl_coefficient is not None:
            self._update.kl_coefficient = kl_coefficient
        return super().update(step, samples)

    def score_as_reference(
        self, samples: Sequence[LearnerSample]
    ) -> tuple[tuple[list[Span], list[str]], ScoredColumns]:
        """`score` by the model without its adapters, which is the reference."""
        with span("policy/reference"), self._adapters.off():
            scored = self._update.score(samples)
        return (recorder.drain(), list(scored)), scored

    def state_dict(self) -> dict[str, Any]:
        """`Learner.state_dict` with the KL coefficient of the last update."""
        return {**super().state_dict(), "kl_coefficient": self._update.kl_coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._update.kl_coefficient = state["kl_coefficient"]

    def estimate(self, rewarded: Sequence[RewardedSample], kl_coefficient: float) -> tuple[Any, ...]:
        """Advantages of a step's samples; asked of one rank, not collective.

        The first value is what the driver reads: spans and `Estimates`. Then come the advantages of each group, in the
        samples' order, and with a critic the returns of each group: a value a group, so that each goes only to the
        ranks that train on it.
        """
        from rlhf.learners.estimate import estimate

        with span("policy/estimate"):
            estimates, columns = estimate(rewarded, self._config, kl_coefficient, self._load_own("advantage"))
        return ((recorder.drain(), estimates), *columns)

    def export(self, path: str | Path) -> None:
        """Write the policy to the folder `path` as a Hugging Face checkpoint with its tokenizer."""
        from rlhf.learners.export import export

        with span("policy/export"):
            export(self, self._ranks, self._config.model.path, self._config.model.dtype, Path(path))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their names in the checkpoint; each once, so without a tied output head."""
        from rlhf.models.lora import checkpoint_parameters

        return checkpoint_parameters(self.module)

    def named_parameters_for_sync(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their checkpoint names; an output head that is the embedding's tensor is listed as well."""
        from rlhf.models.lora import checkpoint_parameters

        unique = dict(self.named_parameters())
        every = checkpoint_parameters(self.module, tied=True)
        tied = [(name, parameter) for name, parameter in every if name not in unique]
        return [*unique.items(), *tied[:1]]

    def gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank, and so are their adapters."""
        return self._zero.gather(self._adapters.beside(parameters))

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """A parameter as engines and the export get it, within `gather`: its adapter is merged into a copy."""
        return self._adapters.merged(parameter)

    @cached_property
    def _adapters(self) -> Adapters:
        from rlhf.models.lora import Adapters

        return Adapters(self.module)

    @property
    def module(self) -> Any:
        """The Hugging Face model."""
        return self._zero.model.lm
