"""What each algorithm needs, without torch: estimators and the models that a configuration calls for."""

from rlhf.config.catalogue import ADVANTAGES, AdvantageSpec, needs_reference

__all__ = ["ADVANTAGES", "AdvantageSpec", "needs_reference"]
