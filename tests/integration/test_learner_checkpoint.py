"""A learner that was saved and loaded is the one that was never interrupted: one rank and two, ZeRO 1, 2 and 3.

Three processes train and save, then three fresh ones load, of the same and of the other number of ranks, and three more
begin a run from the weights (`checkpoint_ranks.py`); the tests read what they found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rlhf.cluster.ports import free_port
from tests.integration.checkpoint_ranks import CASES, KL_COEFFICIENT, Case, draws, saved_cases, seed_streams
from tests.integration.test_learner import relative
from tests.tiny import make_tiny_model, make_tiny_reward_model

DEADLINE_S = 550
FULL_DEADLINE_S = 1200
MEMBERS = [(1, 0), (2, 0), (2, 1)]
# Measured 2.4e-5 of each tensor's norm: another number of ranks means another order of sums.
FLOAT32_BOUND = 1e-4
# Parameters of the tiny model with a head of its own: two tables of 104 x 128; two layers with 128 x 128 + 128 for the
# queries, twice 64 x 128 + 64, 128 x 128 for the output, three times 256 x 128, and two norms of 128; one norm more.
PARAMETERS = 2 * 104 * 128 + 2 * (16_512 + 2 * 8_256 + 16_384 + 3 * 32_768 + 2 * 128) + 128

Found = dict[str, dict[str, Any]]


class Saved(NamedTuple):
    """A learner, by how many ranks it was saved, and whether only the whole matrix has it."""

    case: Case
    world: int
    full: bool

    @property
    def name(self) -> str:
        return f"{self.case.name} on {self.world}"


def _all_saved() -> list[Any]:
    chosen = saved_cases(full=False)
    more = [pair for pair in saved_cases(full=True) if pair not in chosen]
    return [
        *(pytest.param(Saved(*pair, False), id=Saved(*pair, False).name) for pair in chosen),
        *(pytest.param(Saved(*pair, True), id=Saved(*pair, True).name, marks=pytest.mark.full) for pair in more),
    ]


every = pytest.mark.parametrize("saved", _all_saved())
# A run with adapters begins from a model, and not from a checkpoint.
whole = pytest.mark.parametrize("saved", [one for one in _all_saved() if not one.values[0].case.lora])
sharded = pytest.mark.parametrize("saved", [one for one in _all_saved() if one.values[0].case.stage == 3])


def run_ranks(folder: Path, phase: str, full: bool) -> dict[tuple[int, int], dict[str, Any]]:
    """Run one phase in all three processes; what each found, by its world size and rank."""
    command = [sys.executable, "-m", "tests.integration.checkpoint_ranks", "--phase", phase]
    command += ["--models", str(folder), "--out", str(folder), *(["--full"] if full else [])]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1"}
    ports = {1: free_port(), 2: free_port()}
    processes = []
    try:
        for world, rank in MEMBERS:
            place = ["--world", str(world), "--rank", str(rank), "--port", str(ports[world])]
            with (folder / f"log-{phase}-{world}-{rank}.txt").open("w") as log:
                processes.append(subprocess.Popen([*command, *place], env=environment, stdout=log, stderr=log))
        for (world, rank), process in zip(MEMBERS, processes, strict=True):
            code = process.wait(FULL_DEADLINE_S if full else DEADLINE_S)
            assert code == 0, (folder / f"log-{phase}-{world}-{rank}.txt").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {
        member: torch.load(folder / f"{phase}-{member[0]}-{member[1]}.pt", weights_only=False) for member in MEMBERS
    }


def make_wide_model(folder: Path) -> None:
    """The tiny model with 192 in the place of 128 hidden units."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_model(folder, with_template=True)
    config = AutoConfig.from_pretrained(folder, hidden_size=192)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Runs:
    """What all processes found."""

    def __init__(self, folder: Path, full: bool) -> None:
        make_tiny_model(folder / "untied", with_template=True)
        make_tiny_model(folder / "tied", tied=True, with_template=True)
        make_tiny_reward_model(folder / "reward")
        make_wide_model(folder / "wide")
        make_tiny_model(folder / "llama", architecture="llama", with_template=True)
        self.folder = folder
        self.saved = run_ranks(folder, "save", full)
        self.loaded = run_ranks(folder, "load", full)
        self.begun = run_ranks(folder, "begin", full)

    def savers(self, saved: Saved) -> list[dict[str, Any]]:
        """What the ranks that saved it found."""
        return [self.saved[saved.world, rank][saved.name] for rank in range(saved.world)]

    def loaders(self, saved: Saved, world: int) -> list[dict[str, Any]]:
        """What the ranks of a learner with `world` of them found that loaded it."""
        return [self.loaded[world, rank][saved.name] for rank in range(world)]

    def beginners(self, saved: Saved, world: int) -> list[dict[str, Any]]:
        """What the ranks of a learner with `world` of them found that began from its weights."""
        return [self.begun[world, rank][saved.name] for rank in range(world)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Runs]:
    @cache
    def outcome(full: bool) -> Runs | BaseException:
        """What failed once fails for every test, and isn't tried by each of them again."""
        try:
            return Runs(tmp_path_factory.mktemp("checkpoint"), full)
        except Exception as error:
            return error

    def found(full: bool) -> Runs:
        result = outcome(full)
        if isinstance(result, BaseException):
            raise result
        return result

    return found


def equal(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether these are the same tensors, bit for bit."""
    assert values.keys() == expected.keys()
    return all(torch.equal(values[name], expected[name]) for name in expected)


def masters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The float32 weights of an optimizer's state, by the parameters' names."""
    return {name.removesuffix(" master"): value for name, value in state.items() if name.endswith(" master")}


class TestResume:
    @sharded
    def test_a_learner_that_offloads_goes_on_from_one_that_did_not(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        for rank, before in enumerate(runs(saved.full).savers(saved)):
            found = runs(saved.full).loaded[saved.world, rank][f"{saved.name}, offloaded"]
            assert equal(found["weights"], before["saved weights"])
            assert equal(found["state"], before["saved state"])
            # The gradient's norm, by which it is clipped, is summed up in another order: 4e-8 of a tensor's norm.
            assert relative(found["resumed"], before["uninterrupted"]) < 1e-6

    @every
    def test_a_save_leaves_training_as_it_is(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        for found in runs(saved.full).savers(saved):
            assert equal(found["with a save"], found["uninterrupted"])

    @every
    def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        both = zip(runs(saved.full).savers(saved), runs(saved.full).loaders(saved, saved.world), strict=True)
        for before, after in both:
            assert all(metrics[f"{saved.case.role}/grad_norm"] > 0 for metrics in before["metrics"])
            assert not equal(before["saved weights"], before["uninterrupted"])
            assert equal(after["resumed"], before["uninterrupted"])

    @every
    def test_what_is_loaded_is_what_was_there_at_the_moment_of_the_save(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        # The files were written after the update that followed.
        both = zip(runs(saved.full).savers(saved), runs(saved.full).loaders(saved, saved.world), strict=True)
        for before, after in both:
            assert equal(after["weights"], before["saved weights"])
            assert equal(after["state"], before["saved state"])

    @every
    def test_a_learner_that_has_trained_since_loads_as_a_new_one_does(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        for found in runs(saved.full).loaders(saved, saved.world):
            assert equal(found["weights, loaded again"], found["weights"])
            assert equal(found["state, loaded again"], found["state"])

    @every
    def test_schedule_and_counters_go_on(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        for found in runs(saved.full).loaders(saved, saved.world):
            # From 1e-3 at step 2 along a line to 0 at step 6: at step 3 a quarter of the way is done.
            assert found["metrics"][f"{saved.case.role}/learning_rate"] == pytest.approx(0.75e-3)
            assert found["steps"] == 2
            assert found["learner"]["version"] == found["load"].version == 2
            if saved.case.role == "policy":
                assert found["learner"]["kl_coefficient"] == KL_COEFFICIENT

    @every
    def test_every_rank_has_its_own_random_streams_back(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        before = [found["draws"] for found in runs(saved.full).savers(saved)]
        assert [found["draws"] for found in runs(saved.full).loaders(saved, saved.world)] == before
        assert len({tuple(drawn) for drawn in before}) == saved.world


class TestAnotherNumberOfRanks:
    @every
    def test_weights_and_optimizer_state_are_converted_exactly(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        before = runs(saved.full).savers(saved)[0]
        for found in runs(saved.full).loaders(saved, 3 - saved.world):
            assert found["load"].converted_from == saved.world
            assert equal(found["weights"], before["saved weights"])
            assert equal(found["state"], before["saved state"])
            assert equal(found["state, loaded again"], before["saved state"])

    @every
    def test_training_goes_on_from_there(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        before = runs(saved.full).savers(saved)[0]
        for found in runs(saved.full).loaders(saved, 3 - saved.world):
            assert found["metrics"][f"{saved.case.role}/learning_rate"] == pytest.approx(0.75e-3)
            assert not equal(found["resumed"], found["weights"])
            if saved.case.dtype == "float32":
                for name, expected in before["uninterrupted"].items():
                    assert (found["resumed"][name] - expected).norm() <= FLOAT32_BOUND * expected.norm(), name

    @every
    def test_a_rank_that_was_not_saved_keeps_its_random_streams(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        before = [found["draws"] for found in runs(saved.full).savers(saved)]
        seed_streams(1, salt=1)
        expected = [*before, draws()] if saved.world == 1 else before[:1]
        assert [found["draws"] for found in runs(saved.full).loaders(saved, 3 - saved.world)] == expected

    @every
    def test_the_original_is_untouched_and_the_conversion_removed(
        self, runs: Callable[[bool], Runs], saved: Saved
    ) -> None:
        for found in runs(saved.full).loaders(saved, 3 - saved.world):
            assert found["untouched"]
            assert found["left beside"] == []

    @every
    def test_where_that_is_an_error_it_names_both_numbers(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        for found in runs(saved.full).loaders(saved, 3 - saved.world):
            assert f"it was saved by {saved.world} ranks, and this learner has {3 - saved.world}" in found["refused"]


class TestFormat:
    @every
    def test_zero_to_fp32_gives_the_masters(self, runs: Callable[[bool], Runs], saved: Saved) -> None:
        expected = masters(runs(saved.full).savers(saved)[0]["saved state"])
        made = runs(saved.full).loaders(saved, saved.world)[0]["consolidated"]
        tied = {"lm.lm_head.weight"} if saved.case.model == "tied" and not saved.case.lora else set()
        assert made.keys() == expected.keys() | tied
        assert equal({name: made[name] for name in expected}, expected)

    def test_the_script_in_the_folder_works_there(self, runs: Callable[[bool], Runs], tmp_path: Path) -> None:
        case = CASES[2][0]
        folder = runs(False).folder / f"{case.name}-2" / case.role
        command = [sys.executable, "zero_to_fp32.py", ".", str(tmp_path), "--safe_serialization"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
        from safetensors.torch import load_file

        made = load_file(tmp_path / "model.safetensors")
        assert equal(made, masters(runs(False).savers(Saved(case, 2, False))[0]["saved state"]))

    def test_nothing_is_copied_or_written_twice(self, runs: Callable[[bool], Runs]) -> None:
        case = Case("policy", 2, "float32", "untied")
        (found,) = runs(False).savers(Saved(case, 1, False))
        # Weights, masters and two moments of 4 bytes each, and a step count.
        assert found["save"].bytes == PARAMETERS * 16 + 4
        # Besides: DeepSpeed's script of 30 kB, the random streams, names and shapes.
        assert found["save"].bytes < found["write"].bytes < found["save"].bytes + 100_000

    def test_of_a_learner_with_adapters_these_alone_are_saved(self, runs: Callable[[bool], Runs]) -> None:
        case = Case("policy", 2, "bfloat16", "tied", lora=True)
        (found,) = runs(False).savers(Saved(case, 1, False))
        # Rank 4 times inputs + outputs: queries and output 128 + 128, keys and values 128 + 64, three of 128 + 256.
        adapters = 2 * 4 * (2 * 256 + 2 * 192 + 3 * 384)
        # Weights of 2 bytes, masters and two moments of 4 bytes each, and a step count.
        assert found["save"].bytes == adapters * 14 + 4


class TestInitialWeights:
    """A run that begins from another run's checkpoint (`checkpoint.init_from`), on one rank and on two."""

    @whole
    @pytest.mark.parametrize("world", [1, 2])
    def test_the_weights_are_the_saved_masters(self, runs: Callable[[bool], Runs], saved: Saved, world: int) -> None:
        expected = masters(runs(saved.full).savers(saved)[0]["saved state"])
        for found in runs(saved.full).beginners(saved, world):
            # As when an exported model is loaded: rounded to the run's dtype, and the new masters are those.
            rounded = {name: value.to(found["weights"][name].dtype) for name, value in expected.items()}
            assert equal(found["weights"], rounded)
            assert equal(found["masters"], {name: value.float() for name, value in rounded.items()})

    @whole
    @pytest.mark.parametrize("world", [1, 2])
    def test_nothing_else_is_taken_over(self, runs: Callable[[bool], Runs], saved: Saved, world: int) -> None:
        before = runs(saved.full).savers(saved)[0]["saved state"]
        assert any(value.any() for name, value in before.items() if name.endswith(" exp_avg"))
        for found in runs(saved.full).beginners(saved, world):
            assert equal(found["state"], found["state of a new one"])
            assert not any(value.any() for name, value in found["state"].items() if "exp_avg" in name)
            assert found["steps"] == found["learner"]["version"] == 0

    @whole
    @pytest.mark.parametrize("world", [1, 2])
    def test_training_begins_at_step_1(self, runs: Callable[[bool], Runs], saved: Saved, world: int) -> None:
        for found in runs(saved.full).beginners(saved, world):
            # Half of the way to 1e-3 at step 2.
            assert found["metrics"][f"{saved.case.role}/learning_rate"] == pytest.approx(0.5e-3)
            assert found["metrics"][f"{saved.case.role}/grad_norm"] > 0
            assert found["untouched"]

    @pytest.mark.parametrize(("world", "rank"), MEMBERS)
    def test_a_checkpoint_without_that_role_is_named(self, runs: Callable[[bool], Runs], world: int, rank: int) -> None:
        refused = runs(False).begun[world, rank]["refused"]
        policy, critic = (
            runs(False).folder / f"{name}-2" for name in ("policy-1-float32-untied", "critic-3-float32-reward")
        )
        assert refused["critic-3-float32-reward from policy-1-float32-untied"] == (
            f"checkpoint.init_from has no critic ({policy / 'critic'}): that run had none"
        )
        assert refused["policy-1-float32-untied from critic-3-float32-reward"] == (
            f"checkpoint.init_from has no policy ({critic / 'policy'}): that run had none"
        )

    @pytest.mark.parametrize(
        ("model", "named"),
        [
            ("wide", "lm.lm_head.weight"),
            # The head would be dropped, and so would the biases that a Llama doesn't have.
            ("tied", "lm.lm_head.weight"),
            ("llama", "lm.model.layers.0.self_attn.k_proj.bias"),
        ],
    )
    @pytest.mark.parametrize(("world", "rank"), MEMBERS)
    def test_weights_of_another_model_are_refused_by_name(
        self, runs: Callable[[bool], Runs], world: int, rank: int, model: str, named: str
    ) -> None:
        message = runs(False).begun[world, rank]["refused"][f"policy-2-float32-{model} from policy-1-float32-untied"]
        folder = runs(False).folder / "policy-1-float32-untied-2" / "policy"
        assert message.startswith(f"{folder} is the checkpoint of another model: ")
        assert named in message


class TestWriting:
    @pytest.mark.parametrize("world", [1, 2])
    def test_a_second_save_waits_until_the_first_is_written(self, runs: Callable[[bool], Runs], world: int) -> None:
        for rank in range(world):
            found = runs(False).saved[world, rank]["writing"]
            assert found["files before the release"] == []
            # `shards` with the module and a file a rank; `learner.json`, `latest`, the script, and a file a rank.
            assert found["files of the first at the second's return"] == 5 + 2 * world

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("which", ["first", "second"])
    def test_each_save_has_the_weights_of_its_own_time(
        self, runs: Callable[[bool], Runs], world: int, which: str
    ) -> None:
        found = runs(False).saved[world, 0]["writing"]
        assert not equal(found["first weights"], found["second weights"])
        for name, weight in found[f"{which} weights"].items():
            assert torch.equal(found[f"{which} on disk"][name].to(weight.dtype), weight), name

    @pytest.mark.parametrize("world", [1, 2])
    def test_a_write_that_fails_is_raised_where_it_failed(self, runs: Callable[[bool], Runs], world: int) -> None:
        *others, last = [runs(False).saved[world, rank]["writing"]["failed write"] for rank in range(world)]
        assert "File too large" in last
        assert f"bad-{world}/shards/" in last
        assert others == ["none"] * (world - 1)

    @pytest.mark.parametrize("world", [1, 2])
    def test_a_failure_nobody_asked_for_is_raised_by_the_next_save_on_every_rank(
        self, runs: Callable[[bool], Runs], world: int
    ) -> None:
        for rank in range(world):
            message = runs(False).saved[world, rank]["writing"]["next save"]
            assert message.startswith(
                f"writing the policy's checkpoint before failed on rank {world - 1}: OSError: [Errno 27] File too large"
            )

    @pytest.mark.parametrize("world", [1, 2])
    def test_training_and_saving_go_on_after_a_failure(self, runs: Callable[[bool], Runs], world: int) -> None:
        for rank in range(world):
            found = runs(False).saved[world, rank]["writing"]
            assert found["metrics after it"]["policy/grad_norm"] > 0
            assert found["write after it"].bytes > 0
