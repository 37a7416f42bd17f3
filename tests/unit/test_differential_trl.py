"""The same numbers as TRL, whose own code is called here: on padded tensors there, on flat ones here.

Its trainers are made without `__init__`, with the attributes that the called method reads. What its model and its
engine would deliver, log-probs and rewards, are the random numbers of the test. Where the two differ on purpose, the
test says why and states the exact relation.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import AdvantageBatch, estimate_advantages
from rlhf.algorithms.aggregation import Aggregation, Totals, token_weight
from rlhf.algorithms.correction import correct
from rlhf.algorithms.kl import add_kl, kl_loss_per_token, kl_per_token
from rlhf.algorithms.losses import LossTokens, PolicyLoss, policy_loss, weighted_sum
from rlhf.config.schema import AlgorithmConfig, CorrectionConfig
from tests.unit.loss_tokens import algorithm, rows_of

LENGTHS = [5, 2, 7, 1, 4, 7]
MAX_NEW_TOKENS = 8
LOW, HIGH = 0.2, 0.3
SEEDS = [0, 1, 2]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(scope="module")
def trl() -> Iterator[SimpleNamespace]:
    """TRL's trainers, of one process and without vLLM, whose log-probs the tests provide."""
    with pytest.MonkeyPatch.context() as patch:
        # Importing vLLM takes long, and what is called here needs none.
        patch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)
        from trl.trainer import grpo_trainer, rloo_trainer

        modules: tuple[ModuleType, ...] = (grpo_trainer, rloo_trainer)
        for module in modules:
            patch.setattr(module, "gather_object", lambda values: values)
        patch.setattr(rloo_trainer, "gather", lambda values: values)
        yield SimpleNamespace(GRPO=grpo_trainer.GRPOTrainer, RLOO=rloo_trainer.RLOOTrainer)


@dataclass
class Case:
    """Random log-probs [S, T] with an advantage for each of the S responses; slots beyond `lengths` are padding."""

    logprobs: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor
    advantages: Tensor
    lengths: list[int]

    @staticmethod
    def random(seed: int, dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> Case:
        """Ratios up to about e^1.2, so that every bound of these tests is crossed both ways."""
        shape = (len(lengths), max(lengths))
        generator = torch.Generator().manual_seed(seed)
        old, *steps = torch.randn(4, *shape, dtype=dtype, generator=generator) * 0.4
        old = old - 2
        advantages = torch.randn(shape[0], dtype=dtype, generator=generator)
        return Case(old + steps[0], old, old + steps[1], old + steps[2], advantages, list(lengths))

    @property
    def mask(self) -> Tensor:
        """bool [S, T]: the slots that hold a token."""
        return torch.arange(self.logprobs.shape[1]) < torch.tensor(self.lengths)[:, None]

    def part(self, start: int, stop: int) -> Case:
        """Some of the responses."""
        pick = slice(start, stop)
        rows = (self.logprobs[pick], self.old[pick], self.reference[pick], self.engine[pick], self.advantages[pick])
        return Case(*rows, self.lengths[pick])


def stand_in(trainer_class: type, **attributes: Any) -> Any:
    """An instance of a trainer of TRL, not initialised, that is training in one process."""
    trainer = object.__new__(trainer_class)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_metrics": {"train": defaultdict(list)},
    }
    vars(trainer).update(common | attributes)
    return trainer


def grpo_trainer(trl: SimpleNamespace, loss_type: str, **changes: Any) -> Any:
    """A GRPOTrainer with the attributes that `_compute_loss` reads: `delta` and such in `args`, others its own."""
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "gradient_checkpointing_kwargs": None,
    }
    own = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "max_completion_length": MAX_NEW_TOKENS,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
    }
    for name, value in changes.items():
        (args if name in args else own)[name] = value
    return stand_in(trl.GRPO, args=SimpleNamespace(**args), **own)


def their_loss(trainer: Any, case: Case, step_tokens: int | None = None, **inputs: Any) -> tuple[float, Tensor]:
    """Loss and its gradient [S, T] by TRL's `_compute_loss` for one micro-batch."""
    leaf = case.logprobs.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    mask = case.mask.long()
    batch = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": case.advantages,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.reference,
        "num_items_in_batch": torch.tensor(step_tokens or sum(case.lengths)),
        **inputs,
    }
    loss = trainer._compute_loss(None, batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


@dataclass
class Ours:
    loss: float
    gradient_N: Tensor
    policy: PolicyLoss


def our_loss(
    case: Case, config: AlgorithmConfig, aggregation: Aggregation, weights_N: Tensor | None = None, beta: float = 0.0
) -> Ours:
    """Loss and its gradient [N] by this package for the whole step, put together as the learner does."""
    mask, rows_N = case.mask, rows_of(case.lengths)
    leaf = case.logprobs[mask].clone().requires_grad_()
    old_N = case.old[mask]
    tokens = LossTokens(leaf, old_N, case.advantages[rows_N], rows_N, len(case.lengths), weights_N)
    policy = policy_loss(tokens, config)
    kl_N = kl_loss_per_token(leaf, case.reference[mask], config.kl.estimator, old_N if config.kl.unbiased else None)
    totals = Totals.of(case.lengths, MAX_NEW_TOKENS)
    weight_S = torch.tensor([token_weight(aggregation, length, totals) for length in case.lengths])
    loss = weighted_sum(add_kl(policy.loss_N, kl_N, beta), weight_S[rows_N])
    return Ours(loss.item(), torch.autograd.grad(loss, leaf)[0], policy)


def assert_same(ours: Ours, theirs: tuple[float, Tensor], case: Case) -> None:
    """Equal loss and gradient, in float32: ours computes in it whatever it is given."""
    loss, gradient = theirs
    assert ours.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(ours.gradient_N, gradient[case.mask], rtol=1e-4, atol=1e-6, check_dtype=False)
    assert ours.gradient_N.any() and not gradient[~case.mask].any()


CLIP = {"low": LOW, "high": HIGH}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
class TestLosses:
    @pytest.mark.parametrize(
        ("loss_type", "aggregation"),
        [
            ("grpo", "sequence_mean_token_mean"),
            ("bnpo", "token_mean"),
            ("dapo", "token_mean"),
            ("dr_grpo", "constant"),
            ("luspo", "sequence_mean"),
        ],
    )
    def test_ppo_loss_under_every_aggregation(
        self, trl: SimpleNamespace, loss_type: str, aggregation: Aggregation, seed: int, dtype: torch.dtype
    ) -> None:
        case = Case.random(seed, dtype)
        ours = our_loss(case, algorithm("ppo", clip=CLIP), aggregation)
        assert_same(ours, their_loss(grpo_trainer(trl, loss_type), case), case)
        assert ours.policy.clipped_N.any() and not ours.policy.clipped_N.all()

    def test_gspo(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        case = Case.random(seed, dtype)
        # Narrow, as the ratio of a whole response is near 1; the fourth response is one token and leaves it for sure.
        clip = {"low": 0.03, "high": 0.04}
        case.advantages[3] = math.copysign(1.0, case.logprobs[3, 0] - case.old[3, 0])
        trainer = grpo_trainer(trl, "grpo", importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04)
        ours = our_loss(case, algorithm("gspo", clip=clip), "sequence_mean_token_mean")
        assert_same(ours, their_loss(trainer, case), case)
        assert ours.policy.clipped_N.any() and not ours.policy.clipped_N.all()

    def test_cispo(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        # TRL's epsilon_high is the largest weight itself, here it is 1 + clip.high, as in the paper's equation 5.
        case = Case.random(seed, dtype)
        ours = our_loss(case, algorithm("cispo", clip=CLIP), "token_mean")
        assert_same(ours, their_loss(grpo_trainer(trl, "cispo", epsilon_high=1 + HIGH), case), case)
        assert ours.policy.clipped_N.any()

    def test_sapo(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        case = Case.random(seed, dtype)
        trainer = grpo_trainer(trl, "sapo", sapo_temperature_pos=0.8, sapo_temperature_neg=2.0)
        config = algorithm("sapo", sapo={"positive": 0.8, "negative": 2.0})
        assert_same(our_loss(case, config, "sequence_mean_token_mean"), their_loss(trainer, case), case)

    def test_dual_clip(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        # TRL cuts the ratio at delta for both signs of the advantage. For a good token the clip range has cut it
        # before, as long as delta is at least 1 + high.
        case = Case.random(seed, dtype)
        ours = our_loss(case, algorithm("ppo", clip={**CLIP, "dual": 1.4}), "token_mean")
        assert_same(ours, their_loss(grpo_trainer(trl, "bnpo", delta=1.4), case), case)
        assert ours.loss != our_loss(case, algorithm("ppo", clip=CLIP), "token_mean").loss

    @pytest.mark.parametrize("unbiased", [False, True])
    def test_kl_term(self, trl: SimpleNamespace, unbiased: bool, seed: int, dtype: torch.dtype) -> None:
        case = Case.random(seed, dtype)
        config = algorithm("ppo", clip=CLIP, kl={"where": "loss", "estimator": "k3", "unbiased": unbiased})
        trainer = grpo_trainer(trl, "grpo", beta=0.3, use_bias_correction_kl=unbiased)
        assert_same(our_loss(case, config, "sequence_mean_token_mean", beta=0.3), their_loss(trainer, case), case)
        kl_N = kl_per_token(case.logprobs[case.mask], case.reference[case.mask], "k3")
        if not unbiased:
            assert trainer._metrics["train"]["kl"] == [pytest.approx(kl_N.mean().item(), rel=1e-5)]

    def test_share_of_clipped_tokens(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        case = Case.random(seed, dtype)
        trainer = grpo_trainer(trl, "bnpo")
        their_loss(trainer, case)
        share = our_loss(case, algorithm("ppo", clip=CLIP), "token_mean").policy.clipped_N.float().mean().item()
        assert trainer._metrics["train"]["clip_ratio/region_mean"] == [pytest.approx(share)]


def test_delta_inside_the_clip_range_also_cuts_good_tokens_in_trl(trl: SimpleNamespace) -> None:
    # r = 2, A = 1, high 0.3, delta 1.2. The dual clip of arXiv:1912.09729 is for A < 0 only: -1.3; TRL: -1.2.
    case = Case.random(0, torch.float32, [1])
    case.logprobs = case.old + math.log(2)
    case.advantages = torch.ones(1)
    assert our_loss(case, algorithm("ppo", clip={**CLIP, "dual": 1.2}), "token_mean").loss == pytest.approx(-1.3)
    assert their_loss(grpo_trainer(trl, "bnpo", delta=1.2), case)[0] == pytest.approx(-1.2)


class TestDenominators:
    """Two micro-batches of one optimizer step; TRL's losses of both add up to that of the step."""

    CASE = Case.random(3, torch.float64)
    PARTS = (CASE.part(0, 3), CASE.part(3, 6))

    def both(self, trl: SimpleNamespace, loss_type: str) -> tuple[float, Tensor]:
        trainer = grpo_trainer(trl, loss_type, current_gradient_accumulation_steps=2, steps_per_generation=2)
        found = [their_loss(trainer, part, step_tokens=sum(LENGTHS)) for part in self.PARTS]
        return sum(loss for loss, _ in found), torch.cat([gradient for _, gradient in found])

    @pytest.mark.parametrize(
        ("loss_type", "aggregation"),
        [
            ("dapo", "token_mean"),
            ("grpo", "sequence_mean_token_mean"),
            ("luspo", "sequence_mean"),
            ("dr_grpo", "constant"),
        ],
    )
    def test_denominator_is_that_of_the_step(
        self, trl: SimpleNamespace, loss_type: str, aggregation: Aggregation
    ) -> None:
        # GRPO, LUSPO and Dr. GRPO only because both micro-batches have three responses: TRL's mean is over each.
        ours = our_loss(self.CASE, algorithm("ppo", clip=CLIP), aggregation)
        assert_same(ours, self.both(trl, loss_type), self.CASE)

    def test_bnpo_divides_by_the_tokens_of_each_micro_batch(self, trl: SimpleNamespace) -> None:
        # Ours never does: its result would depend on how samples are laid out. Theirs is the mean of our losses of
        # the two micro-batches, each taken for a step of its own, here with 14 and 12 tokens.
        config = algorithm("ppo", clip=CLIP)
        alone = [our_loss(part, config, "token_mean") for part in self.PARTS]
        loss, gradient = self.both(trl, "bnpo")
        assert loss == pytest.approx(sum(one.loss for one in alone) / 2, rel=1e-5)
        expected = torch.cat([one.gradient_N for one in alone]) / 2
        torch.testing.assert_close(gradient[self.CASE.mask], expected, check_dtype=False, rtol=1e-4, atol=1e-6)
        step = our_loss(self.CASE, config, "token_mean")
        assert step.loss == pytest.approx((14 * alone[0].loss + 12 * alone[1].loss) / 26, rel=1e-5)
        assert step.loss != pytest.approx(loss, rel=1e-2)


def scorer(trainer_class: type, rewards: Tensor, lengths: Sequence[int], group: int, **attributes: Any) -> Any:
    """A trainer whose engine and reward function return what is given, as `_generate_and_score_completions` needs."""
    prompt_ids, responses = [[5]] * len(lengths), [[7] * length for length in lengths]
    common: dict[str, Any] = {
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "pad_to_multiple_of": None,
        "mask_truncated_completions": False,
        "ref_model": None,
        "beta": 0.0,
        "num_generations": group,
        "num_iterations": 1,
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["given"],
        "multi_objective_aggregation": "sum_then_normalize",
        "log_multimodal": False,
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "args": SimpleNamespace(
            per_device_train_batch_size=len(lengths),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        "_calculate_rewards": lambda *_: rewards[:, None],
        "_generate": lambda prompts: (prompt_ids, responses, None, [""] * len(lengths), None, {}, None, None),
    }
    return stand_in(trainer_class, **common | attributes)


def their_advantages(trainer: Any, samples: int) -> Tensor:
    result: Tensor = trainer._generate_and_score_completions([{"prompt": ""} for _ in range(samples)])["advantages"]
    return result


def our_advantages(
    name: str, rewards: Tensor, group: int, lengths: Sequence[int], penalties_N: Tensor | None = None, **settings: Any
) -> Tensor:
    """One advantage for each sample, float64; groups are neighbours."""
    samples = len(rewards)
    lengths_S = torch.tensor(lengths)
    batch = AdvantageBatch(
        rewards.double(),
        torch.arange(samples) // group,
        lengths_S,
        torch.zeros(sum(lengths), dtype=torch.float64) if penalties_N is None else penalties_N.double(),
    )
    found = estimate_advantages(batch, AlgorithmConfig(advantage=name, **settings))
    return found.advantages_N[batch.last_S]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
class TestAdvantages:
    GROUP = 3

    def rewards(self, seed: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(6, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 2

    def test_grpo_within_a_group(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        # TRL divides by the sample standard deviation s plus 1e-4, ours by that of the population, s sqrt((n-1)/n),
        # and by nothing else: the paper's formula, under which the advantages of a group have mean square 1 whatever
        # the size of its rewards and of the group.
        rewards = self.rewards(seed, dtype)
        theirs = their_advantages(scorer(trl.GRPO, rewards, LENGTHS, self.GROUP, scale_rewards="group"), 6)
        deviation_S = rewards.double().view(2, 3).std(dim=1, correction=1).repeat_interleave(3)
        ours = our_advantages("grpo", rewards, self.GROUP, LENGTHS)
        expected = ours * math.sqrt(2 / 3) * deviation_S / (deviation_S + 1e-4)
        torch.testing.assert_close(theirs, expected, check_dtype=False, rtol=1e-5, atol=1e-6)

    def test_grpo_over_the_batch(self, trl: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
        rewards = self.rewards(seed, dtype)
        theirs = their_advantages(scorer(trl.GRPO, rewards, LENGTHS, self.GROUP, scale_rewards="batch"), 6)
        deviation = rewards.double().std(correction=1)
        ours = our_advantages("grpo", rewards, self.GROUP, LENGTHS, normalize="batch")
        expected = ours * math.sqrt(5 / 6) * deviation / (deviation + 1e-4)
        torch.testing.assert_close(theirs, expected, check_dtype=False, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("name", "settings"), [("grpo", {"normalize": "none"}), ("dr_grpo", {})])
    def test_dr_grpo(
        self, trl: SimpleNamespace, name: str, settings: dict[str, Any], seed: int, dtype: torch.dtype
    ) -> None:
        rewards = self.rewards(seed, dtype)
        theirs = their_advantages(scorer(trl.GRPO, rewards, LENGTHS, self.GROUP, scale_rewards="none"), 6)
        ours = our_advantages(name, rewards, self.GROUP, LENGTHS, **settings)
        torch.testing.assert_close(theirs, ours, check_dtype=False, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("beta", [0.0, 0.2])
    def test_rloo(self, trl: SimpleNamespace, beta: float, seed: int, dtype: torch.dtype) -> None:
        # With KL in the reward: k1 of every token, summed over the response.
        rewards, case = self.rewards(seed, dtype), Case.random(seed, dtype)
        logprobs = iter([case.old, case.reference])
        trainer = rloo_scorer(trl, rewards, self.GROUP)
        trainer.beta, trainer.ref_model = beta, "reference"
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (next(logprobs), None, None)
        theirs = their_advantages(trainer, 6)
        penalties_N = beta * kl_per_token(case.old[case.mask], case.reference[case.mask], "k1")
        ours = our_advantages("rloo", rewards, self.GROUP, LENGTHS, penalties_N)
        torch.testing.assert_close(theirs, ours, check_dtype=False, rtol=1e-5, atol=1e-5)


def rloo_scorer(trl: SimpleNamespace, rewards: Tensor, group: int, **attributes: Any) -> Any:
    """As `scorer`; the engine of RLOOTrainer returns fewer things."""
    generated = [[5]] * len(LENGTHS), [[7] * length for length in LENGTHS], [""] * len(LENGTHS)
    own = {"_generate": lambda prompts: generated, "reward_clip_range": None, "normalize_advantages": False}
    return scorer(trl.RLOO, rewards, LENGTHS, group, **own | attributes)


def test_equal_rewards_give_exactly_zero_and_in_trl_rounding_over_epsilon(trl: SimpleNamespace) -> None:
    # The mean of three times 7.3 is off by 4.8e-7 in float32; divided by 1e-4 that makes an advantage of 0.005.
    rewards = torch.full((6,), 7.3)
    theirs = their_advantages(scorer(trl.GRPO, rewards, LENGTHS, 3, scale_rewards="group"), 6)
    assert 1e-3 < theirs.abs().max() < 1e-2
    assert our_advantages("grpo", rewards, 3, LENGTHS).tolist() == [0.0] * 6


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["ppo", "reinforce"])
def test_first_pass_of_rloo_has_the_same_gradient(trl: SimpleNamespace, name: str, seed: int) -> None:
    # TRL's ratio is that of the whole response, the product over its tokens. Where it is 1 its gradient is
    # A grad(sum of log pi) / S: that of sequence_mean. Further off the two differ, by the choice of ratio.
    case = Case.random(seed, torch.float64)
    case.old = case.logprobs
    trainer = stand_in(trl.RLOO, epsilon_low=LOW, epsilon_high=HIGH, aux_loss_enabled=False)
    old_logps = (case.old * case.mask).sum(1)
    _, gradient = their_loss(trainer, case, old_logps=old_logps)
    ours = our_loss(case, algorithm(name), "sequence_mean")
    torch.testing.assert_close(ours.gradient_N, gradient[case.mask], check_dtype=False, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_correction_of_the_engine_mismatch(trl: SimpleNamespace, method: str, seed: int, dtype: torch.dtype) -> None:
    # The weights that TRL computes when it scores a batch, and the loss that it makes with them and a KL term, which
    # neither multiplies with them.
    case, low, high = Case.random(seed, dtype), 0.7, 1.3
    generated = (
        [[5]] * 6,
        [[7] * length for length in LENGTHS],
        None,
        [""] * 6,
        [case.engine[i, :length].tolist() for i, length in enumerate(LENGTHS)],
        {},
        None,
        None,
    )
    trainer = scorer(
        trl.GRPO,
        torch.zeros(6),
        LENGTHS,
        3,
        scale_rewards="none",
        use_vllm=True,
        vllm_importance_sampling_mode=method,
        vllm_importance_sampling_clip_min=low if method.endswith("mask") else None,
        vllm_importance_sampling_clip_max=high,
        _generate=lambda prompts: generated,
        _get_per_token_logps_and_entropies=lambda *_, **__: (case.old, None, None),
    )
    found = trainer._generate_and_score_completions([{"prompt": ""} for _ in range(6)])
    weights = found["importance_sampling_ratio"]
    mask, rows_N = case.mask, rows_of(LENGTHS)
    config = CorrectionConfig(method=method, low=low, high=high)  # type: ignore[arg-type]
    ours = correct(case.old[mask], case.engine[mask], rows_N, 6, config)
    assert ours is not None
    torch.testing.assert_close(ours.weights_N, weights.expand(6, 7)[mask], check_dtype=False, rtol=1e-5, atol=1e-6)
    assert (ours.weights_N == 0).any() == method.endswith("mask")

    learner = grpo_trainer(trl, "dapo", beta=0.1, use_vllm=True)
    theirs = their_loss(learner, case, importance_sampling_ratio=weights)
    algorithm_config = algorithm("ppo", clip=CLIP)
    assert_same(our_loss(case, algorithm_config, "token_mean", ours.weights_N, beta=0.1), theirs, case)
