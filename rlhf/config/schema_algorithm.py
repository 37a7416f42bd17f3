"""The section `algorithm` of the schema: advantages, losses, KL and corrections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlhf.config.fields import FloatAboveOne, Fraction, NonEmptyText, NonNegativeFloat, PositiveFloat, Section


class ClipConfig(Section):
    """The trust region of the clipped losses: the ratio is clipped to [1 - low, 1 + high]."""

    low: NonNegativeFloat = Field(default=0.2, description="How far the ratio may fall below 1.")
    high: NonNegativeFloat = Field(default=0.2, description="How far the ratio may rise above 1.")
    dual: FloatAboveOne | None = Field(
        default=None,
        description="Dual clip: for negative advantages the loss counts at most this multiple of the advantage; 3 is "
        "common. Off when absent.",
    )


class SapoConfig(Section):
    """Temperatures of the soft gate of SAPO: the higher, the faster the gradient fades as the ratio leaves 1."""

    positive: PositiveFloat = Field(default=1.0, description="For positive advantages.")
    negative: PositiveFloat = Field(default=1.05, description="For negative advantages.")


class DppoConfig(Section):
    """The trust region of DPPO, on the divergence of the two policies instead of their ratio."""

    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="Total variation or KL, of the sampled token against all others (binary)."
    )
    threshold: PositiveFloat = Field(
        default=0.15, description="Divergence beyond which a token that moves further away is left out."
    )


class KLConfig(Section):
    """KL divergence from the reference model."""

    where: Literal["none", "reward", "loss"] = Field(
        default="none", description="Subtract KL from the reward of each token, add it to the loss, or neither."
    )
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="Estimator, by Schulman's names; `abs` is the absolute log-ratio."
    )
    coefficient: NonNegativeFloat = Field(
        default=0.0, description="Factor of the KL term; where it starts if adaptive."
    )
    unbiased: bool = Field(
        default=False,
        description="In the loss: weight the estimate with the ratio to the sampling policy, which makes the gradient "
        "that of the KL itself.",
    )
    controller: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: the coefficient follows the measured KL towards `target`."
    )
    target: PositiveFloat = Field(default=0.1, description="KL that the adaptive controller aims at, nats per token.")
    horizon: PositiveFloat = Field(
        default=10000, description="Samples over which the adaptive controller corrects its error; larger is slower."
    )


class CorrectionConfig(Section):
    """Weights for samples whose engine did not sample from quite the policy that is trained.

    The ratio is that of the trainer's log-probs before the first update to the engine's, of the same tokens.
    """

    method: Literal[
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
        "decoupled",
    ] = Field(
        default="token_truncate",
        description="token_truncate: the token's ratio, at most `high` (TIS). token_mask: the ratio, and 0 outside "
        "[low, high] (IcePop). sequence_truncate, sequence_mask: the same with the product over the response. "
        "geometric_mask: 1 where the geometric mean over the response is within [low, high], else 0. decoupled: "
        "decoupled PPO, the ratio, and 0 above `high`.",
    )
    low: NonNegativeFloat = Field(default=0.5, description="Lower bound of the masking methods.")
    high: PositiveFloat = Field(default=2.0, description="Upper bound.")


class AlgorithmConfig(Section):
    """Which advantage, loss and aggregation."""

    advantage: NonEmptyText = Field(
        default="grpo",
        description="Advantage estimator: `gae`, `grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce_plus_plus`, "
        "`reinforce_plus_plus_baseline`, `remax`, `opo`, `maxrl`, a registered name, or `module:function`.",
    )
    normalize: Literal["group", "batch", "none"] = Field(
        default="group", description="What grpo divides by: standard deviation of the group, of the batch, or nothing."
    )
    gamma: Fraction = Field(default=1.0, description="Discount per token, for estimators with returns per token.")
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of gae.")
    whiten: bool = Field(
        default=True, description="gae: scale the batch's advantages to mean 0 and standard deviation 1."
    )
    loss: NonEmptyText = Field(
        default="ppo",
        description="Policy loss: `ppo`, `gspo`, `cispo`, `sapo`, `reinforce`, `dppo`, a registered name, or "
        "`module:function`.",
    )
    clip: ClipConfig = Field(default_factory=ClipConfig)
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    dppo: DppoConfig = Field(default_factory=DppoConfig)
    aggregation: Literal["token_mean", "sequence_mean", "sequence_mean_token_mean", "constant"] = Field(
        default="token_mean",
        description="How per-token losses become one number; one global denominator per optimizer step.",
    )
    kl: KLConfig = Field(default_factory=KLConfig)
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    old_logprobs: Literal["auto", "recompute", "engine"] = Field(
        default="auto",
        description="Log-probs that ratios start from: the trainer's own, recomputed before the first update (auto "
        "leaves the pass out where the only update of a batch makes the ratio 1), or the engine's.",
    )
    entropy_coefficient: NonNegativeFloat = Field(
        default=0.0, description="Factor of the entropy bonus, over the full distribution at the temperature."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings for advantage estimators and losses of your own."
    )
