"""Distributed RLHF on Ray: DeepSpeed learners, vLLM engines, verified weight sync.

`import rlhf` is fast: torch, ray and vllm are imported when something needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.algorithms.registry import register_advantage, register_policy_loss
    from rlhf.config import Config, load_config
    from rlhf.trainers.ppo import PPOTrainer

__all__ = ["Config", "PPOTrainer", "load_config", "register_advantage", "register_policy_loss"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Config", "load_config"):
        import rlhf.config

        return getattr(rlhf.config, name)
    if name in ("register_advantage", "register_policy_loss"):
        import rlhf.algorithms.registry

        return getattr(rlhf.algorithms.registry, name)
    if name == "PPOTrainer":
        from rlhf.trainers.ppo import PPOTrainer

        return PPOTrainer
    raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
