"""Train with an advantage estimator and a policy loss of your own, from Python.

    python examples/custom_algorithm.py --config configs/quickstart.yaml run.name=own run.steps=5

A decorator gives each function a name that the configuration can use. In a YAML file without such a program they are
named `examples/custom_algorithm.py:median_baseline` and `examples/custom_algorithm.py:spo`. docs/algorithms.md says
what the functions get and have to return, and what happens when one of them fails.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from rlhf import PPOTrainer, load_config, register_advantage, register_policy_loss
from rlhf.algorithms.advantages import AdvantageBatch
from rlhf.algorithms.losses import SurrogateInput
from rlhf.config.schema import AlgorithmConfig

OWN = [
    "algorithm.advantage=median_baseline",
    "algorithm.loss=spo",
    "algorithm.options={epsilon: 0.2}",
    # In a batch's first update the ratio is 1 and spo is the plain policy gradient; its penalty acts from the second.
    "policy.minibatches=2",
]


@register_advantage("median_baseline", min_group_size=2)
def median_baseline(batch: AdvantageBatch, config: AlgorithmConfig) -> Tensor:
    """Reward minus the median of the group: one very good or very bad answer does not move the baseline.

    One advantage for each of the S samples. The median of an even number of rewards is the mean of the middle two.
    """
    advantages_S = batch.sequence_rewards_S.clone()
    for group in batch.groups_S.unique():
        members_S = batch.groups_S == group
        advantages_S[members_S] -= batch.sequence_rewards_S[members_S].quantile(0.5)
    return advantages_S


@register_policy_loss("spo")
def spo(inputs: SurrogateInput, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Simple policy optimization, arXiv:2401.16025: instead of a clip, a penalty that grows with the ratio's distance.

    |A| (r - 1)^2 / (2 epsilon) - r A for each of the N tokens, smallest at r = 1 + epsilon where A > 0 and at
    r = 1 - epsilon where A < 0; nothing is clipped.
    """
    epsilon = config.options["epsilon"]
    advantages_N, ratio_N = inputs.advantages_N, inputs.ratio_N
    penalty_N = advantages_N.abs() * (ratio_N - 1).square() / (2 * epsilon)
    return penalty_N - ratio_N * advantages_N, torch.zeros_like(advantages_N, dtype=torch.bool)


def main() -> None:
    """Read the configuration, with our own functions in it, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml", help="configuration file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [*OWN, *arguments.overrides])
    PPOTrainer(config).fit()


if __name__ == "__main__":
    main()
