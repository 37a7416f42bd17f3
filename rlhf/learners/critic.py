"""The critic learner: a value model with its own optimizer, ranks and ZeRO stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.schema import CriticConfig
from rlhf.learners.learner import Learner

if TYPE_CHECKING:
    from torch import nn

    from rlhf.learners.update import UpdateLoop


class CriticLearner(Learner):
    """One rank of the critic. `score` gives the value of the state before each response token."""

    role = "critic"

    @property
    def settings(self) -> CriticConfig:
        return self._config.critic

    def build(self) -> nn.Module:
        """The value model: the policy's or another causal LM's body with a new head, or a reward model with its own."""
        from rlhf.models.value import load_value_model

        config, start = self._config, self._config.critic.model
        if start == "policy":
            return load_value_model(config.model.path, config.model.dtype, head="new")
        if start == "reward":
            assert config.reward.model is not None, "critic.model: reward needs reward.model"
            return load_value_model(config.reward.model.path, config.model.dtype, head="checkpoint")
        return load_value_model(start, config.model.dtype, head="auto")

    def make_update(self) -> UpdateLoop:
        from rlhf.learners.critic_update import CriticUpdate

        return CriticUpdate(self._config, self._zero, self._ranks)
