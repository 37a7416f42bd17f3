"""What each algorithm needs, without torch: estimators, losses, and the models that a configuration calls for."""

from rlhf.config.catalogue import (
    ADVANTAGES,
    LOSSES,
    AdvantageSpec,
    LossSpec,
    advantage_spec,
    has_reference_pool,
    loss_spec,
    needs_critic,
    needs_greedy,
    needs_old_logprobs,
    needs_reference,
    policy_is_reference,
    updates_per_batch,
)

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AdvantageSpec",
    "LossSpec",
    "advantage_spec",
    "has_reference_pool",
    "loss_spec",
    "needs_critic",
    "needs_greedy",
    "needs_old_logprobs",
    "needs_reference",
    "policy_is_reference",
    "updates_per_batch",
]
