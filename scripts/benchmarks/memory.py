"""The memory that a policy learner takes, against what the preflight says that it needs.

    bash scripts/setup_env.sh
    python scripts/benchmarks/memory.py
    python scripts/benchmarks/memory.py --only "ZeRO 3"

Each setting runs in processes of its own, a real `PolicyLearner` on each rank: it loads the model, makes the dry run,
and two updates whose micro-batches are as large as the cap allows; the second has two of them on each rank. `measured`
is the most that a rank held resident in a phase of that, above what the same process held before it loaded anything
(imports done, process group joined). Phases are those of the learner's own metrics, and the kernel's peak is lowered
before each.

`needed` is a rank's share by `rlhf.cluster.needs`, for the same configuration. Weights are not sent here and no
checkpoint is written, so `without sync` leaves the buckets of the weight sync out of what is needed. They are taken
between updates, when activations are free again, so the truth of a run lies between the two. `worst_deviation` is the
largest difference of measured / needed from 1, and `worst_deviation_without_sync` the same without the buckets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    BenchmarkError,
    carry_out,
    console,
    finish,
    markdown,
    run_ranks,
    show,
    threads,
    versions,
)
from learner_side import Job, learner_config, make_samples

from rlhf.cluster.model_shape import ModelShape
from rlhf.cluster.needs import DeviceBytes, needs
from rlhf.config.schema import Config

WANTED = 0.15
GROUP = 8
# Micro-batches of a rank in the second update: gradients of the first are held while the second goes forward.
MICRO_BATCHES = 2
# What setting up and updating would import; the last one is DeepSpeed's doing, and 40 MB.
IMPORTED_LATER = (
    "rlhf.learners.checkpoint",
    "rlhf.learners.policy_update",
    "rlhf.learners.zero",
    "torch._inductor.compile_fx",
)
DEADLINE_S = 1800.0
PACKAGES = ("rlhf", "torch", "transformers", "deepspeed", "peft")


@dataclass(frozen=True)
class Setting:
    """What of the policy's section is varied."""

    stage: int
    ranks: int = 1
    dtype: str = "bfloat16"
    checkpointing: bool = False
    lora: int = 0
    offload: str = "none"
    offload_to: str = "host"

    @property
    def name(self) -> str:
        """For the table."""
        parts = [f"ZeRO {self.stage}, {self.ranks} rank{'s'[: self.ranks - 1]}, {self.dtype}"]
        parts += ["activation checkpointing"] * self.checkpointing
        parts += [f"LoRA {self.lora}"] * (self.lora > 0)
        where = " to disk" if self.offload_to == "disk" else ""
        parts += [f"offload {self.offload}{where}"] * (self.offload != "none")
        return ", ".join(parts)


SETTINGS = (
    *(Setting(stage, ranks) for ranks in (1, 2) for stage in (1, 2, 3)),
    *(Setting(stage, dtype="float32") for stage in (1, 2)),
    Setting(3, ranks=2, dtype="float32"),
    Setting(2, checkpointing=True),
    Setting(3, ranks=2, checkpointing=True),
    Setting(2, lora=16),
    Setting(3, ranks=2, lora=16),
    Setting(3, offload="optimizer"),
    Setting(3, offload="optimizer_and_parameters"),
)
# With `--disk`: it needs libaio, and compiles for minutes at the first time.
ON_DISK = (Setting(3, offload="optimizer", offload_to="disk"),)


def make_job(setting: Setting, model: str, tokens: int) -> Job:
    """Groups that are a micro-batch of exactly `tokens` tokens each (a multiple of 128), two for each rank."""
    prompt = tokens // 16
    return Job(
        model=model,
        dtype=setting.dtype,
        workload="groups",
        lengths="constant",
        layout=None,
        stage=setting.stage,
        ranks=setting.ranks,
        prompts=MICRO_BATCHES * setting.ranks,
        samples=GROUP,
        prompt_tokens=prompt,
        response_tokens=(tokens - prompt) // GROUP,
        sigma=0.0,
        max_tokens=tokens,
        updates=2,
        seed=1,
    )


def make_config(setting: Setting, job: Job) -> Config:
    """The job's configuration with the rest of the setting."""
    config = learner_config(job).model_dump()
    config["policy"] |= {"activation_checkpointing": setting.checkpointing}
    config["policy"] |= {"offload": setting.offload, "offload_to": setting.offload_to}
    if setting.lora:
        config["policy"]["lora"] = {"rank": setting.lora}
    return Config.model_validate(config)


def resident() -> int:
    """Bytes that this process holds in memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def measure_rank(setting: Setting, job: Job, rank: int, port: int) -> dict[str, Any]:
    """What one rank held before it loaded anything, and the most it held in each phase, bytes."""
    import torch

    from rlhf.learners.memory import PhasePeaks
    from rlhf.learners.policy import PolicyLearner
    from rlhf.models.distributed import join_process_group

    config = make_config(setting, job)
    learner = PolicyLearner(config, rank, setting.ranks, "cpu")
    join_process_group(rank, setting.ranks, ("127.0.0.1", port), "cpu", config.policy.deadline_s)
    import_everything(job.model, lora=setting.lora > 0)
    samples = make_samples(job, ModelShape.from_path(job.model).vocab)
    peaks, idle = PhasePeaks(torch.device("cpu")), resident()
    with peaks.phase("setup"):
        learner.setup(("127.0.0.1", port))
    with peaks.phase("dry_run"):
        learner.dry_run()
    updates = [learner.update(1, samples[: len(samples) // MICRO_BATCHES]), learner.update(2, samples)]
    found = peaks.take()
    for name in ("forward_backward", "optimizer"):
        found[name] = int(max(result.metrics.get(f"policy/peak_bytes_{name}", 0.0) for result in updates))
    attention, count = learner.module.config._attn_implementation, torch.get_num_threads()
    learner.close()
    return {"idle": idle, "peaks": found, "attention": attention, "threads": count}


def import_everything(model: str, lora: bool) -> None:
    """Import what a learner would on its way, so that it doesn't count as memory for the model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    for name in (*IMPORTED_LATER, *["peft"] * lora):
        importlib.import_module(name)
    # Looking the class up imports its module.
    _ = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(model))]


def compare(found: Sequence[Mapping[str, Any]], needed: DeviceBytes) -> dict[str, Any]:
    """The rank that held most above what it held idle, and how that compares with what is needed."""
    above = [{name: peak - rank["idle"] for name, peak in rank["peaks"].items()} for rank in found]
    phases = max(above, key=lambda of_rank: max(of_rank.values()))
    measured = max(phases.values())
    without_sync = needed.total - needed.sync_buckets
    return {
        "measured": measured,
        "needed": needed.total,
        "without_sync": without_sync,
        "ratio": measured / needed.total,
        "ratio_without_sync": measured / without_sync,
        "phases": phases,
        "parts": asdict(needed),
        **{name: found[0][name] for name in ("idle", "attention", "threads")},
    }


def run(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one setting, in processes of its own."""
    job = make_job(setting, str(arguments.model), arguments.tokens)
    child = json.dumps({"setting": asdict(setting), "job": asdict(job)})
    found = run_ranks(
        [sys.executable, __file__, "--child", child], setting.ranks, what=setting.name, deadline_s=DEADLINE_S
    )
    policy = needs(make_config(setting, job), ModelShape.from_path(arguments.model)).pool("policy")
    assert policy is not None
    return compare(found, policy.bytes)


def worst(rows: Mapping[str, Mapping[str, Any]], ratio: str) -> float:
    """The largest difference of a ratio from 1, in either direction."""
    return max(abs(row[ratio] - 1) for row in rows.values())


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each setting, bytes in MB."""
    found = []
    for name, row in rows.items():
        phases = [
            f"{row['phases'][phase] / 1e6:,.0f}" for phase in ("setup", "dry_run", "forward_backward", "optimizer")
        ]
        sizes = [f"{row[key] / 1e6:,.0f}" for key in ("measured", "needed")]
        found.append([name, *phases, *sizes, f"{row['ratio']:.2f}", f"{row['ratio_without_sync']:.2f}"])
    return found


def report(arguments: argparse.Namespace, where: Mapping[str, Any], rows: Mapping[str, dict[str, Any]]) -> None:
    """Print the table, and the JSON object as the last line."""
    phases = ["setup", "dry run", "passes", "optimizer"]
    header = ["MB above idle", *phases, "measured", "needed", "measured / needed", "without sync"]
    show(f"A rank of {arguments.model.name}, micro-batches of {arguments.tokens} tokens", header, table(rows))
    figures = {
        "benchmark": "memory",
        "worst_deviation": worst(rows, "ratio"),
        "worst_deviation_without_sync": worst(rows, "ratio_without_sync"),
        "wanted": WANTED,
        "settings": [{"setting": name, **row} for name, row in rows.items()],
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "cores": threads(),
        "machine": where,
        "versions": versions(*PACKAGES),
    }
    finish(figures, [markdown(header, table(rows))])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, default=2048, help="cap on a micro-batch, a multiple of 128")
    parser.add_argument("--only", default="", help="settings whose name in the table contains this")
    parser.add_argument("--disk", action="store_true", help="also what is offloaded to a disk, which needs libaio")
    for name in ("--child", "--rank", "--port"):
        parser.add_argument(name, type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.tokens < 128 or arguments.tokens % 128:
        parser.error("--tokens must be a multiple of 128: a prompt is a 16th of it, and eight responses are the rest")
    arguments.model = arguments.model.resolve()
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every setting that was asked for, one after the other."""
    rows: dict[str, dict[str, Any]] = {}
    for setting in (*SETTINGS, *ON_DISK * arguments.disk):
        if arguments.only in setting.name:
            console.print(f"{setting.name} … ", end="")
            rows[setting.name] = run(setting, arguments)
            console.print(f"{rows[setting.name]['ratio']:.2f} of what is needed")
    if not rows:
        raise BenchmarkError(f"no setting's name contains {arguments.only!r}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 when a setting fails."""
    arguments = parse(argv)
    if arguments.child:
        setting, job = Setting(**arguments.child["setting"]), Job(**arguments.child["job"])
        print(json.dumps(measure_rank(setting, job, arguments.rank, arguments.port)), flush=True)
        return 0
    return carry_out("memory", arguments, measure, report)


if __name__ == "__main__":
    sys.exit(main())
