"""Time GRPO steps of TRL's `GRPOTrainer` on the CPU: the peer that `step_time.py` compares with, in its own process.

    bash scripts/setup_env.sh
    python scripts/benchmarks/trl_step.py --dtype float32 --steps 3

The model, the problems and the algorithm are those of `configs/quickstart.yaml`: chain_sum with two one-digit terms,
groups of 8, token-mean GRPO loss, no KL, constant learning rate, problems in the order of their seed. TRL runs as fast
as its settings allow here: no gradient checkpointing, the whole batch in one micro-batch (`--microbatch` makes it
smaller). `--dtype bfloat16` is mixed precision with float32 master weights: at a learning rate of 1e-5, updates of
pure bfloat16 weights mostly round away.

Prints one line a step, and one JSON object as the last line. Times are wall-clock seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TASK = "chain_sum"
TASK_OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PHASES = ("generation", "rewards", "forward_backward", "optimizer", "other")


class PhaseClock:
    """Wall-clock seconds of the current step, by phase."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a step: its phases are at 0."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.tokens = 0
        self.reward = 0.0
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def end(self) -> dict[str, float]:
        """Return the step's phases, which add up to `step`, and what else was noted."""
        step = time.perf_counter() - self._began
        phases = dict(self.seconds)
        phases["other"] = step - sum(phases.values())
        return {"step": step, **phases, "tokens": self.tokens, "reward": self.reward}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Time GRPO steps of TRL on the CPU.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--microbatch", type=int, help="sequences in one forward pass (default: all of them)")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--problem-seed", type=int, default=42, help="data.prompts.seed of the configuration")
    arguments = parser.parse_args(argv)
    sequences = arguments.prompts * arguments.samples
    arguments.microbatch = arguments.microbatch or sequences
    if sequences % arguments.microbatch:
        parser.error(f"--microbatch {arguments.microbatch} does not divide {sequences} sequences per step")
    return arguments


def build_trainer(arguments: argparse.Namespace, clock: PhaseClock, output: str) -> Any:
    """Return a GRPOTrainer whose phases are timed by `clock`."""
    from datasets import Dataset
    from reasoning_gym.factory import create_dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rlhf.rewards.extract import find_answer

    size = arguments.prompts * arguments.steps
    problems = create_dataset(TASK, seed=arguments.problem_seed, size=size, **TASK_OPTIONS)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tokenizer.chat_template is None:
        prompts: list[Any] = [problem["question"] for problem in problems]
    else:
        prompts = [[{"role": "user", "content": problem["question"]}] for problem in problems]

    def last_number(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        with clock.phase("rewards"):
            answers = [find_answer(text, "last_number") for text in texts]
            scores = [
                0.0 if answer is None else float(problems.score_answer(answer, problems[row]))
                for answer, row in zip(answers, index, strict=True)
            ]
        clock.reward = statistics.fmean(scores)
        return scores

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *positional: Any, **named: Any) -> Any:
            with clock.phase("generation"):
                result = super()._generate_single_turn(*positional, **named)
            clock.tokens = sum(len(ids) for ids in result[0])
            return result

        def training_step(self, *positional: Any, **named: Any) -> Any:
            before = clock.seconds["generation"] + clock.seconds["rewards"]
            began = time.perf_counter()
            result = super().training_step(*positional, **named)
            inside = clock.seconds["generation"] + clock.seconds["rewards"] - before
            clock.seconds["forward_backward"] += time.perf_counter() - began - inside
            return result

    sequences = arguments.prompts * arguments.samples
    settings = GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=arguments.dtype == "bfloat16",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=arguments.microbatch,
        gradient_accumulation_steps=sequences // arguments.microbatch,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        max_steps=arguments.steps,
        shuffle_dataset=False,
        seed=arguments.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return TimedTrainer(
        model=str(arguments.model),
        processing_class=tokenizer,
        reward_funcs=last_number,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts, "index": list(range(size))}),
    )


def run(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train for `steps` steps and return their measurements."""
    from transformers import PrinterCallback, TrainerCallback

    clock = PhaseClock()
    steps: list[dict[str, float]] = []
    optimizer_began = 0.0

    class StepTimer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            nonlocal optimizer_began
            optimizer_began = time.perf_counter()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.seconds["optimizer"] += time.perf_counter() - optimizer_began

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append(clock.end())
            print(f"{len(steps):>4} " + " ".join(f"{steps[-1][name]:>16.3f}" for name in columns), flush=True)

    columns = ("step", *PHASES, "tokens", "reward")
    print("     " + " ".join(f"{name:>16}" for name in columns))
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(arguments, clock, output)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StepTimer())
        trainer.train()
    return steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when TRL or the model is missing."""
    arguments = parse(argv)
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        print("trl_step: TRL is not installed: bash scripts/setup_env.sh", file=sys.stderr)
        return 1
    if not arguments.model.is_dir():
        print(f"trl_step: no model at {arguments.model}: python scripts/prepare_model.py", file=sys.stderr)
        return 1
    # It says so at import; its vLLM mode is not used here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", DS_ACCELERATOR="cpu")
    steps = run(arguments)
    # The first step warms up allocator and caches; it counts only when it is all there is.
    counted = steps[1:] or steps
    result = {
        "trl": version,
        "dtype": arguments.dtype,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "steps": steps,
        "median": {name: statistics.median(step[name] for step in counted) for name in ("step", *PHASES)},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
