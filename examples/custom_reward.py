"""Train with a reward function of your own, from Python.

    python examples/custom_reward.py --config configs/quickstart.yaml run.name=brevity run.steps=5

A reward function gets all responses to one prompt and returns one number for each, or None where it doesn't apply. It
runs in a worker process with a deadline, so it may crash or hang without taking the run with it. Functions given here
are added to those of the configuration, each with weight 1; the weighted sum trains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rlhf import PPOTrainer, load_config
from rlhf.rewards import RewardInput, RewardResult


def brevity(samples: Sequence[RewardInput]) -> list[RewardResult]:
    """A hundredth off for each token; a response that was cut off at the length limit loses half a point more.

    Each metric is logged beside the score, as `reward/brevity/<metric>`.
    """
    results = []
    for sample in samples:
        cut_off = sample.finish_reason == "length"
        score = -0.01 * len(sample.response_ids) - (0.5 if cut_off else 0.0)
        results.append(RewardResult(score, {"characters": len(sample.response), "cut_off": float(cut_off)}))
    return results


def main() -> None:
    """Read the configuration and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml", help="configuration file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    PPOTrainer(config, reward_functions={"brevity": brevity}).fit()


if __name__ == "__main__":
    main()
