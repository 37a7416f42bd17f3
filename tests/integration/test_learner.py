"""The policy learner on real DeepSpeed: one rank and two ranks over gloo, ZeRO 1, 2 and 3, float32 and bfloat16.

The three processes run once for the module (`learner_ranks.py`); the tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.cluster.ports import free_port
from rlhf.config.schema import LoraConfig
from rlhf.models.batch import pad_batch
from rlhf.models.lora import add_adapters
from rlhf.models.operations import Operations
from rlhf.models.value import load_value_model
from tests.integration.learner_ranks import advantage_of, make_samples, with_returns
from tests.tiny import make_tiny_model, make_tiny_reward_model

DEADLINE_S = 550
STAGES = (1, 2, 3)
RUNS = ("one rank", "two ranks, first", "two ranks, second")
# Measured 2.3e-6 and 2.9e-2 of each tensor's norm over all layouts, ranks and stages. Other micro-batches mean other
# summation orders in the matrix products, which in bfloat16 (8 bits of mantissa) is what the second bound is made of.
FLOAT32_BOUND, BFLOAT16_BOUND = 1e-5, 5e-2

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learner")
    make_tiny_model(folder / "untied", with_template=True)
    make_tiny_model(folder / "tied", tied=True, with_template=True)
    make_tiny_model(folder / "dropout", attention_dropout=0.5)
    make_tiny_reward_model(folder / "reward")
    return folder


def run_ranks(module: str, folder: Path) -> Found:
    """Run that module of this folder in all three processes; what each found, by its name in `RUNS`."""
    command = [sys.executable, "-m", f"tests.integration.{module}", "--models", str(folder), "--out", str(folder)]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1"}
    ports = {1: free_port(), 2: free_port()}
    members = [(1, 0), (2, 0), (2, 1)]
    processes = []
    try:
        for world, rank in members:
            place = ["--world", str(world), "--rank", str(rank), "--port", str(ports[world])]
            log = (folder / f"log-{world}-{rank}.txt").open("w")
            processes.append(subprocess.Popen([*command, *place], env=environment, stdout=log, stderr=log))
        for (world, rank), process in zip(members, processes, strict=True):
            code = process.wait(DEADLINE_S)
            assert code == 0, (folder / f"log-{world}-{rank}.txt").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        name: torch.load(folder / f"found-{world}-{rank}.pt", weights_only=False)
        for name, (world, rank) in zip(RUNS, members, strict=True)
    }


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return run_ranks("learner_ranks", folder)


def of_the_batch(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that don't depend on the machine and the layout."""
    measured = ("per_second", "_fraction", "mfu", "mfu_with_optimizer")
    own = {"policy/clip_fraction", "critic/clip_fraction"}
    return {k: v for k, v in metrics.items() if k in own or not (k.endswith(measured) or "/peak_bytes_" in k)}


def relative(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to the norm of the expected one."""
    assert values.keys() == expected.keys()
    return max(
        float((values[name].double() - expected[name].double()).norm() / expected[name].double().norm())
        for name in expected
    )


def plain_loss(model: Any, seed: int) -> torch.Tensor:
    """The token-mean loss of a batch at ratio 1, sample by sample over the whole vocabulary."""
    losses = []
    for sample in make_samples(seed):
        ids = torch.from_numpy(sample.columns.token_ids.astype(np.int64))  # type: ignore[union-attr]
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
        chosen = logprobs.gather(1, ids[1:, None]).squeeze(1)[sample.prompt_tokens - 1 :]
        losses.append(-advantage_of(sample) * (chosen - chosen.detach()).exp())
    return torch.cat(losses).mean()


def gradients_of(model_folder: Path) -> dict[str, torch.Tensor]:
    """Loss and gradients of the first batch by plain torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    loss = plain_loss(model, 0)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach().double()[None], **gradients}


@pytest.fixture(scope="module")
def plain_gradients(folder: Path) -> dict[str, torch.Tensor]:
    return gradients_of(folder / "untied")


class TestGradients:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("layout", ["1x8", "middle", "8x1", "after dry run"])
    def test_gradient_does_not_change_with_micro_batches_ranks_or_stage(
        self, found: Found, plain_gradients: dict[str, torch.Tensor], run: str, stage: int, layout: str
    ) -> None:
        gradients = found[run][f"stage {stage} float32"][f"gradients {layout}"]
        assert relative(gradients, plain_gradients) < FLOAT32_BOUND

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("layout", ["1x8", "middle", "8x1", "after dry run"])
    def test_bfloat16_gradient_is_within_its_bound_of_the_float32_one(
        self, found: Found, plain_gradients: dict[str, torch.Tensor], run: str, stage: int, layout: str
    ) -> None:
        gradients = found[run][f"stage {stage} bfloat16"][f"gradients {layout}"]
        assert relative(gradients, plain_gradients) < BFLOAT16_BOUND

    @pytest.mark.parametrize("stage", STAGES)
    def test_rank_without_samples_takes_part(self, found: Found, stage: int) -> None:
        key, what = f"stage {stage} float32", "gradients of one sample"
        assert relative(found["two ranks, first"][key][what], found["one rank"][key][what]) < FLOAT32_BOUND

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_responses_of_one_and_three_tokens(self, found: Found, run: str, stage: int) -> None:
        # Advantages +1 and -1, ratio 1: token mean (-1 + 3) / 4, mean of sequence means (-1 + 1) / 2.
        for dtype in ("float32", "bfloat16"):
            losses = found[run][f"stage {stage} {dtype}"]
            assert losses["loss of one and three tokens, token_mean"] == pytest.approx(0.5, abs=1e-6)
            assert losses["loss of one and three tokens, sequence_mean_token_mean"] == pytest.approx(0.0, abs=1e-6)


class TestFailures:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_failure_on_one_rank_is_raised_on_all(self, found: Found, run: str, stage: int) -> None:
        message = found[run][f"stage {stage} float32"]["one rank fails"]
        rank = 0 if run == "one rank" else 1
        assert message.startswith(f"fetching samples failed on rank {rank}: ValueError: sample ")

    @pytest.mark.parametrize("run", RUNS)
    def test_sequence_beyond_a_hard_cap_fails_on_all(self, found: Found, run: str) -> None:
        message = found[run]["settings"]["longer sequences refused"]
        assert message.startswith("fetching samples failed on rank 0: ValueError: sample 0-0 has ")
        assert "more than the 2 of a micro-batch, and longer sequences are refused" in message

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_loss_that_is_not_finite_names_the_sample(self, found: Found, run: str, stage: int) -> None:
        message = found[run][f"stage {stage} float32"]["NaN advantage"]
        assert "not finite for samples 0-2" in message

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradient_that_is_not_finite_is_not_applied(self, found: Found, run: str, stage: int, dtype: str) -> None:
        message = found[run][f"stage {stage} {dtype}"]["gradient overflows"]
        assert "was not applied; it was over samples 0-" in message

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_failures_zero_advantages_and_rate_zero_leave_every_bit(
        self, found: Found, run: str, stage: int, dtype: str
    ) -> None:
        checked = found[run][f"stage {stage} {dtype}"]
        assert all(torch.equal(checked["start"][name], checked["unmoved"][name]) for name in checked["start"])


def train_plainly(model: Any, parameters: list[torch.nn.Parameter]) -> list[float]:
    """Three updates of these parameters by plain torch; the norm of each gradient before it was clipped."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    norms = []
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        plain_loss(model, seed).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
    return norms


class TestTraining:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_three_updates_are_those_of_plain_torch(self, found: Found, folder: Path, run: str, stage: int) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "untied")
        norms = train_plainly(model, list(model.parameters()))
        training = found[run][f"training {stage} untied float32"]
        assert [m["policy/grad_norm"] for m in training["metrics"]] == pytest.approx(norms, rel=1e-4)
        # Softmax does not see a key bias: its gradient is rounding, which Adam scales up to full steps.
        weights = {name: p.detach() for name, p in model.named_parameters() if "k_proj.bias" not in name}
        assert relative({name: training["weights"][name] for name in weights}, weights) < 1e-4

    @pytest.mark.parametrize("run", RUNS)
    def test_ranks_report_the_same_metrics(self, found: Found, run: str) -> None:
        for stage in STAGES:
            for ours, theirs in zip(
                found[run][f"training {stage} untied float32"]["metrics"],
                found["one rank"]["training 1 untied float32"]["metrics"],
                strict=True,
            ):
                assert of_the_batch(ours) == pytest.approx(of_the_batch(theirs), rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("stage", STAGES)
    def test_what_is_measured_of_speed_and_memory_is_the_same_on_all_ranks(self, found: Found, stage: int) -> None:
        first, second = (found[run][f"training {stage} untied float32"]["metrics"] for run in RUNS[1:])
        assert first == second
        for metrics in first:
            assert 0 < metrics["policy/mfu_with_optimizer"] < metrics["policy/mfu"]
            assert metrics["policy/useful_tokens_per_second"] > 0
            # torch and DeepSpeed alone take more.
            assert min(metrics["policy/peak_bytes_forward_backward"], metrics["policy/peak_bytes_optimizer"]) > 1e8

    @pytest.mark.parametrize("stage", STAGES)
    def test_useful_operations_are_those_of_whole_matrices(self, found: Found, stage: int) -> None:
        # Two layers: q, o 2 x 128 x 128, k, v 2 x 128 x 64, MLP 3 x 128 x 256; a head of 104 x 128; 4 heads of 32.
        expected = Operations(6.0 * 2 * 147_456, 6.0 * 104 * 128, 12.0 * 4 * 32, (None, None))
        assert all(found[run][f"training {stage} untied float32"]["operations"] == expected for run in RUNS)

    def test_spans_of_an_update(self, found: Found) -> None:
        names = found["one rank"]["training 1 untied float32"]["spans"]
        assert names == ["policy/fetch", "policy/forward_backward", "policy/optimizer", "policy/update"]

    def test_no_operator_was_compiled(self, found: Found, folder: Path) -> None:
        assert not list(folder.glob("extensions/**/*"))


class TestAdapters:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    def test_three_updates_are_those_of_plain_torch(self, found: Found, folder: Path, run: str, stage: int) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "tied")
        add_adapters(model, LoraConfig(rank=4), seed=1)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        norms = train_plainly(model, list(trained.values()))
        training = found[run][f"adapters {stage} float32"]
        assert [m["policy/grad_norm"] for m in training["metrics"]] == pytest.approx(norms, rel=1e-4)
        assert relative(training["adapters"], {name: p.detach() for name, p in trained.items()}) < 1e-4

    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_frozen_weights_and_the_reference_stay_as_they_were(
        self, found: Found, run: str, stage: int, dtype: str
    ) -> None:
        checked = found[run][f"adapters {stage} {dtype}"]
        before, after = checked["frozen before"], checked["frozen after"]
        assert all(torch.equal(before[name], after[name]) for name in before)
        for sample_id, values in checked["reference before"].items():
            # Fresh adapters are 0, so the policy was the reference.
            assert np.array_equal(values, checked["policy before"][sample_id], equal_nan=True)
            assert np.array_equal(values, checked["reference after"][sample_id], equal_nan=True)

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_engines_get_what_is_exported_and_it_has_moved(
        self, found: Found, folder: Path, world: int, stage: int, dtype: str
    ) -> None:
        from safetensors import safe_open

        checked = found[RUNS[world - 1]][f"adapters {stage} {dtype}"]
        sent, frozen = checked["sent"], checked["frozen before"]
        assert sent.keys() == frozen.keys()
        with safe_open(folder / f"export-{world}-adapters-{dtype}-{stage}" / "model.safetensors", "pt") as exported:
            # A tied head is written once and sent under both of its names.
            assert set(exported.keys()) == sent.keys() - {"lm_head.weight"}
            assert all(torch.equal(exported.get_tensor(name), sent[name]) for name in exported.keys())  # noqa: SIM118
        moved = {name for name in sent if not torch.equal(sent[name], frozen[name])}
        assert moved == {name for name in sent if "_proj.weight" in name}


class TestExport:
    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize(("model", "dtype"), [("untied", "float32"), ("tied", "float32"), ("tied", "bfloat16")])
    def test_export_loads_with_the_trained_weights(
        self, found: Found, folder: Path, world: int, stage: int, model: str, dtype: str
    ) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder / f"export-{world}-{model}-{dtype}-{stage}")
        assert str(loaded.dtype) == f"torch.{dtype}"
        run = RUNS[0] if world == 1 else RUNS[1]
        weights = found[run][f"training {stage} {model} {dtype}"]["weights"]
        exported = dict(loaded.named_parameters(remove_duplicate=False))
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weights[name]) for name in weights)

    @pytest.mark.parametrize("stage", STAGES)
    def test_tokenizer_and_generation_settings_are_copied_unchanged(
        self, found: Found, folder: Path, stage: int
    ) -> None:
        exported = folder / f"export-2-tied-float32-{stage}"
        copied = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
        for name in copied:
            assert (exported / name).read_bytes() == (folder / "tied" / name).read_bytes()

    def test_names_for_the_sync_are_those_of_the_checkpoint_and_the_tied_head(self, found: Found, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / "tied" / "model.safetensors", "pt") as checkpoint:
            expected = {*checkpoint.keys(), "lm_head.weight"}
        for stage in STAGES:
            assert set(found["two ranks, first"][f"training {stage} tied float32"]["names"]) == expected


class TestLogProbs:
    @pytest.mark.parametrize("stage", STAGES)
    def test_shares_make_up_the_whole_and_agree_with_one_rank(self, found: Found, stage: int) -> None:
        key = f"stage {stage} float32"
        whole = found["one rank"][key]["logprobs"]
        shares = [found[run][key]["logprobs"] for run in RUNS[1:]]
        assert not shares[0].keys() & shares[1].keys()
        for sample_id, values in {**shares[0], **shares[1]}.items():
            np.testing.assert_allclose(values, whole[sample_id], atol=1e-5)
        assert whole.keys() == {sample.sample_id for sample in make_samples()}

    @pytest.mark.parametrize("run", RUNS)
    def test_dropout_does_not_move_the_ratio_from_one(self, found: Found, run: str) -> None:
        settings = found[run]["settings"]
        first, second = settings["log-probs twice"]
        assert all(np.array_equal(first[i], second[i], equal_nan=True) for i in first)
        # Two epochs of two minibatches at learning rate 0: old log-probs come from a pass of their own.
        assert settings["dropout"]["policy/update_kl"] < 1e-6
        assert settings["dropout"]["policy/clip_fraction"] == 0.0

    @pytest.mark.parametrize("run", RUNS)
    def test_engine_log_probs_at_the_same_weights_pass_and_shifted_ones_do_not(self, found: Found, run: str) -> None:
        settings = found[run]["settings"]
        assert settings["parity"]["parity/max_abs"] < 1e-4
        assert settings["parity, shifted by one"]["parity/max_abs"] > 1.0


class TestReferenceKL:
    @pytest.mark.parametrize("run", RUNS)
    def test_half_a_nat_from_the_reference(self, found: Found, run: str) -> None:
        # k3 at 0.5 is 0.10653; advantages are 0, so the loss is the coefficient, 2, times it.
        metrics = found[run]["settings"]["kl"]
        assert metrics["policy/kl"] == pytest.approx(0.10653, abs=1e-4)
        assert metrics["policy/loss"] == pytest.approx(0.21306, abs=2e-4)

    @pytest.mark.parametrize("run", RUNS)
    def test_coefficient_zero_leaves_loss_and_gradient_alone(self, found: Found, run: str) -> None:
        poisoned, without = (
            found[run]["settings"]["NaN reference, coefficient 0"],
            found[run]["settings"]["no reference"],
        )
        for name in ("policy/loss", "policy/grad_norm"):
            assert poisoned[name] == without[name]
        assert "policy/kl" not in without


@pytest.fixture(scope="module")
def plain_critic(folder: Path) -> dict[str, torch.Tensor]:
    """Values, loss and gradients of the critic by plain torch: half the squared error against returns, token mean."""
    model = load_value_model(str(folder / "reward"), "float32", "checkpoint")
    samples = with_returns(make_samples())
    values = model(pad_batch([s.columns for s in samples], "cpu"))  # type: ignore[misc]
    flat = {
        name: torch.from_numpy(
            np.concatenate([s.scores[name][s.sample_id][s.prompt_tokens :] for s in samples])  # type: ignore[index]
        )
        for name in ("values", "returns")
    }
    clipped = torch.clamp(values, flat["values"] - 0.5, flat["values"] + 0.5)
    errors = torch.maximum((values - flat["returns"]) ** 2, (clipped - flat["returns"]) ** 2)
    loss = 0.5 * errors.mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.lm.named_parameters() if p.grad is not None}
    return {"values": values.detach(), "loss": loss.detach().double()[None], **gradients}


class TestCritic:
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("layout", ["1x8", "8x1", "after dry run"])
    def test_gradient_is_that_of_plain_torch_for_any_micro_batches_ranks_and_stage(
        self, found: Found, plain_critic: dict[str, torch.Tensor], run: str, stage: int, layout: str
    ) -> None:
        gradients = found[run][f"critic {stage}"][f"gradients {layout}"]
        expected = {name: value for name, value in plain_critic.items() if name != "values"}
        assert relative({name: gradients[name] for name in expected}, expected) < FLOAT32_BOUND

    @pytest.mark.parametrize("stage", STAGES)
    def test_rank_without_samples_takes_part(self, found: Found, stage: int) -> None:
        key, what = f"critic {stage}", "gradients of one sample"
        assert relative(found["two ranks, first"][key][what], found["one rank"][key][what]) < FLOAT32_BOUND

    @pytest.mark.parametrize("stage", STAGES)
    def test_shares_of_values_make_up_the_whole(
        self, found: Found, plain_critic: dict[str, torch.Tensor], stage: int
    ) -> None:
        shares = [found[run][f"critic {stage}"]["values"] for run in RUNS[1:]]
        assert not shares[0].keys() & shares[1].keys()
        whole = {**shares[0], **shares[1]}
        flat = np.concatenate([whole[s.sample_id][s.prompt_tokens :] for s in make_samples()])
        np.testing.assert_allclose(flat, plain_critic["values"].numpy(), atol=1e-5)

    @pytest.mark.parametrize("run", RUNS)
    def test_updates_bring_the_values_to_the_returns(self, found: Found, run: str) -> None:
        for stage in STAGES:
            losses = [m["critic/loss"] for m in found[run][f"critic {stage}"]["metrics"]]
            assert losses[-1] < 0.7 * losses[0]

    def test_ranks_report_the_same_metrics(self, found: Found) -> None:
        first, *others = (of_the_batch(found[run]["critic 1"]["metrics"][0]) for run in RUNS)
        assert all(other == pytest.approx(first, rel=1e-4, abs=1e-6) for other in others)

    def test_explained_variance_is_that_of_the_values_before_the_update(self, found: Found) -> None:
        samples = with_returns(make_samples())
        values, returns = (
            np.concatenate([s.scores[name][s.sample_id][s.prompt_tokens :] for s in samples])  # type: ignore[index]
            for name in ("values", "returns")
        )
        metrics = found["two ranks, first"]["critic 1"]["metrics"][0]
        assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns))
        assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), abs=1e-6)

    @pytest.mark.parametrize("run", RUNS)
    def test_samples_without_returns_are_an_error(self, found: Found, run: str) -> None:
        assert "no returns" in found[run]["critic 1"]["no returns"]


class TestLossTerms:
    @pytest.mark.parametrize("run", RUNS)
    def test_an_engine_that_agrees_has_weight_one_and_the_ratio_is_exactly_one(self, found: Found, run: str) -> None:
        metrics = found[run]["loss"]["engine agrees"]
        assert metrics["policy/ratio_max"] == 1.0
        assert metrics["correction/weight_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["correction/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["parity/kl"] == pytest.approx(0.0, abs=1e-6)

    @pytest.mark.parametrize("run", RUNS)
    def test_weights_are_truncated_and_multiply_the_loss(self, found: Found, run: str) -> None:
        # Trainer four times as likely as the engine: weight min(4, 2) = 2, advantage 1, ratio 1: loss -2.
        # Mismatch, k3 with d = engine - trainer = -ln 4: exp(ln 4) - 1 - ln 4 = 1.61371.
        metrics = found[run]["loss"]["engine four times less likely"]
        assert metrics["correction/weight_mean"] == pytest.approx(2.0, rel=1e-5)
        assert metrics["policy/loss"] == pytest.approx(-2.0, rel=1e-5)
        assert metrics["parity/kl"] == pytest.approx(1.61371, rel=1e-4)

    @pytest.mark.parametrize("run", RUNS)
    def test_the_entropy_bonus_is_its_coefficient_times_the_entropy(self, found: Found, run: str) -> None:
        metrics = found[run]["loss"]["entropy bonus"]
        assert metrics["policy/loss"] == pytest.approx(-0.5 * metrics["policy/entropy"], rel=1e-5)
        assert metrics["policy/grad_norm"] > 0

    @pytest.mark.parametrize("run", RUNS)
    def test_a_ratio_from_the_engine_starts_where_the_engine_is(self, found: Found, run: str) -> None:
        # The ratio is 4 in the first update, clipped at 1.5: loss -1.5, and no gradient is left.
        metrics = found[run]["loss"]["ratio from the engine"]
        assert metrics["policy/ratio_max"] == pytest.approx(4.0, rel=1e-5)
        assert metrics["policy/loss"] == pytest.approx(-1.5, rel=1e-5)
        assert metrics["policy/clip_fraction"] == 1.0
        assert metrics["policy/grad_norm"] == 0.0

    @pytest.mark.parametrize("run", RUNS)
    def test_an_exception_in_the_users_loss_on_one_rank_ends_the_update_on_all(self, found: Found, run: str) -> None:
        rank = 0 if run == "one rank" else 1
        message = found[run]["loss"]["own loss fails on the last rank"]
        assert message.startswith(f"computing the loss failed on rank {rank}: RuntimeError: the user's own mistake")
        # The learner goes on: the next update is that of a loss that works, -2 A r.
        assert found[run]["loss"]["own loss"]["policy/loss"] == pytest.approx(-2.0, rel=1e-6)
