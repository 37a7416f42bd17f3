"""One rank of learners that save, or that load what others saved: the process behind `test_learner_checkpoint.py`.

`--phase save` trains and saves. `--phase load` runs in fresh processes, of as many ranks and of another number, and so
does `--phase begin`, where learners of another run begin from the weights (`checkpoint.init_from`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf.learners import snapshot
from rlhf.learners.critic import CriticLearner
from rlhf.learners.policy import PolicyLearner
from rlhf.learners.ranks import LearnerError
from tests.integration.learner_ranks import Rank, make_config, make_samples, with_returns

STEPS = 6
# Bytes; less than a rank's shard of the tiny model, more than a log.
FILE_LIMIT = 500_000
KL_COEFFICIENT = 0.25


class Case(NamedTuple):
    """A learner; with `lora` it trains adapters of rank 4."""

    role: str
    stage: int
    dtype: str
    model: str
    lora: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.role, str(self.stage), self.dtype, self.model, *(["lora"] if self.lora else [])])


# A pairwise choice: every stage with each number of ranks, each dtype, a tied and an untied head, and adapters.
CASES = {
    1: [
        Case("policy", 1, "bfloat16", "tied"),
        Case("policy", 2, "float32", "untied"),
        Case("policy", 3, "bfloat16", "untied"),
        Case("critic", 2, "bfloat16", "reward"),
        Case("policy", 2, "bfloat16", "tied", lora=True),
    ],
    2: [
        Case("policy", 1, "float32", "untied"),
        Case("policy", 2, "bfloat16", "tied"),
        Case("policy", 3, "float32", "tied"),
        Case("critic", 3, "float32", "reward"),
        Case("policy", 1, "bfloat16", "tied", lora=True),
        Case("policy", 3, "float32", "tied", lora=True),
    ],
}
FULL = [
    *(Case("policy", s, d, m) for s in (1, 2, 3) for d in ("float32", "bfloat16") for m in ("tied", "untied")),
    *(Case("critic", s, d, "reward") for s in (1, 2, 3) for d in ("float32", "bfloat16")),
    *(Case("policy", s, d, "tied", lora=True) for s in (1, 2, 3) for d in ("float32", "bfloat16")),
]


def saved_cases(full: bool) -> list[tuple[Case, int]]:
    """What is saved, and by how many ranks.

    Those of stage 3 come last: DeepSpeed then replaces torch's linear function for the whole process, which rounds
    otherwise in bfloat16. An actor has one learner.
    """
    every = {1: FULL, 2: FULL} if full else CASES
    saved = [(case, world) for world, chosen in every.items() for case in chosen]
    return sorted(saved, key=lambda pair: pair[0].stage)


def make(arguments: argparse.Namespace, case: Case, offload: str = "none", init_from: Path | None = None) -> Any:
    """A learner whose rate rises to 1e-3 at step 2 and falls to 0 at step 6; it may begin from another's weights."""
    settings: dict[str, Any] = {
        "offload": offload,
        "zero_stage": case.stage,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    models = Path(arguments.models)
    sections: dict[str, dict[str, Any]] = {
        "run": {"deterministic": True, "steps": STEPS},
        "checkpoint": {"init_from": None if init_from is None else str(init_from)},
    }
    if case.role == "critic":
        sections["algorithm"] = {"advantage": "gae"}
        sections["critic"] = {**settings, "model": str(models / case.model)}
        return Rank(arguments, make_config(models / "untied", case.dtype, **sections), CriticLearner).learner
    if case.lora:
        settings["lora"] = {"rank": 4}
    config = make_config(models / case.model, case.dtype, policy=settings, **sections)
    return Rank(arguments, config, PolicyLearner).learner


def update(learner: Any, step: int) -> dict[str, float]:
    """One step; the metrics."""
    if learner.role == "critic":
        metrics: dict[str, float] = learner.update(step, with_returns(make_samples(step), step)).metrics
    else:
        metrics = learner.update(step, make_samples(step), KL_COEFFICIENT).metrics
    return metrics


def weights(learner: Any) -> dict[str, torch.Tensor]:
    """All weights in the compute dtype, whole on every rank."""
    found = {}
    for name, parameter in learner._zero.model.named_parameters():
        with learner._zero.gather([parameter]):
            found[name] = parameter.detach().clone()
    return found


def float32_weights(learner: Any) -> dict[str, torch.Tensor]:
    """The optimizer's own weights, of what is trained, whole on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param

    trained = [(name, p) for name, p in learner._zero.model.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained}


def raw_state(learner: Any) -> dict[str, torch.Tensor]:
    """What the optimizer remembers of its steps on this rank, as it holds it: nothing, or zeros, before the first."""
    states = enumerate(learner._zero._optimizer.state.values())
    return {f"{index} {key}": value.clone() for index, state in states for key, value in state.items()}


def optimizer_state(learner: Any) -> dict[str, torch.Tensor]:
    """Masters, both moments and step counts of what is trained, whole on every rank."""
    from deepspeed.utils import safe_get_full_optimizer_state

    optimizer = learner.engine.optimizer
    if learner._zero.stage < 3:
        # DeepSpeed makes the views that these functions read at the first step, of the state that there is then.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    found = {f"{name} master": value for name, value in float32_weights(learner).items()}
    trained = [(name, p) for name, p in learner._zero.model.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {moment}"] = safe_get_full_optimizer_state(parameter, moment).clone()
    for index, state in enumerate(learner._zero._optimizer.state.values()):
        found[f"step of group {index}"] = state["step"].clone()
    return found


def seed_streams(rank: int, salt: int = 0) -> None:
    """Set every stream to a place of this rank's own, in the middle of a pair of normal numbers."""
    seed = 10 * salt + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1)
    np.random.normal()


def draws() -> list[float]:
    """The next numbers of every stream."""
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.normal()),
        float(np.random.random()),
        *torch.rand(2).tolist(),
    ]


@contextmanager
def held_writer(learner: Any) -> Iterator[threading.Event]:
    """The state is copied only when somebody is about to change it, or after 20 seconds.

    Files are written after the event is set, which happens at the end of the block at the latest.
    """
    asked, release = threading.Event(), threading.Event()
    before_change, write, copy = learner._zero.before_change, snapshot._write_all, snapshot.Memory.copy

    def ask() -> None:
        asked.set()
        before_change()

    def late_copy(self: snapshot.Memory, taken: snapshot.Snapshot) -> snapshot.Snapshot:
        asked.wait(20)
        return copy(self, taken)

    def held_write(*arguments: Any) -> Any:
        release.wait()
        return write(*arguments)

    learner._zero.before_change = ask
    snapshot.Memory.copy, snapshot._write_all = late_copy, held_write  # type: ignore[method-assign]
    try:
        yield release
    finally:
        asked.set()
        release.set()
        learner._zero.before_change = before_change
        snapshot.Memory.copy, snapshot._write_all = copy, write  # type: ignore[method-assign]


def check_save(arguments: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Three updates without a save, and three with one after the second that is written after the third."""
    found: dict[str, Any] = {}
    plain = make(arguments, case)
    found["metrics"] = [update(plain, step) for step in (1, 2, 3)]
    found["uninterrupted"] = weights(plain)

    learner = make(arguments, case)
    for step in (1, 2):
        update(learner, step)
    found["saved weights"], found["saved state"] = weights(learner), optimizer_state(learner)
    seed_streams(arguments.rank)
    with held_writer(learner):
        found["save"] = learner.save(str(path_of(arguments, case, arguments.world)))
        found["draws"] = draws()
        update(learner, 3)
    found["write"] = learner.finish_save()
    found["with a save"] = weights(learner)
    return found


def check_writing(arguments: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Two saves in a row, then one that one rank can't write, and training after that."""
    found: dict[str, Any] = {}
    first, second, failing = (Path(arguments.out) / f"{name}-{arguments.world}" for name in ("first", "second", "bad"))
    learner = make(arguments, case)
    update(learner, 1)
    found["first weights"] = weights(learner)
    with held_writer(learner) as release:
        learner.save(str(first))
        update(learner, 2)
        found["second weights"] = weights(learner)
        found["files before the release"] = sorted(first.rglob("*"))
        threading.Timer(0.5, release.set).start()
        learner.save(str(second))
        found["files of the first at the second's return"] = len(list(first.rglob("*")))
    learner.finish_save()
    torch.distributed.barrier()

    last = arguments.rank == arguments.world - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, limits[1]))
    learner.save(str(failing))
    found["failed write"] = failure_of(learner.finish_save)
    learner.save(str(failing))
    found["metrics after it"] = update(learner, 3)
    found["next save"] = failure_of(lambda: learner.save(str(failing)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    learner.save(str(failing))
    found["write after it"] = learner.finish_save()
    torch.distributed.barrier()
    if arguments.rank == 0:
        found["first on disk"], found["second on disk"] = consolidated(first), consolidated(second)
    return found


def failure_of(call: Callable[[], Any]) -> str:
    """The message with which a call fails, or "none"."""
    try:
        call()
    except (LearnerError, OSError, ValueError) as error:
        return str(error)
    return "none"


def consolidated(path: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's `zero_to_fp32` makes of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    made: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path))
    return made


def check_load(arguments: argparse.Namespace, case: Case, saved_world: int) -> dict[str, Any]:
    """Load what `saved_world` ranks saved in a learner as it is before step 1, and train on."""
    found: dict[str, Any] = {}
    path = path_of(arguments, case, saved_world)
    before = fingerprints(path)
    learner = make(arguments, case)
    learner.dry_run()
    seed_streams(arguments.rank, salt=1)
    if saved_world != arguments.world:
        found["refused"] = failure_of(lambda: learner.load(str(path), "error"))
    found["load"] = learner.load(str(path), "convert")
    found["draws"] = draws()
    found["weights"], found["state"] = weights(learner), optimizer_state(learner)
    found["learner"] = learner.state_dict()
    found["steps"] = learner.engine.global_steps
    found["metrics"] = update(learner, 3)
    found["resumed"] = weights(learner)
    # One that has trained since, as when another role was lost.
    learner.load(str(path), "convert")
    found["weights, loaded again"], found["state, loaded again"] = weights(learner), optimizer_state(learner)
    found["untouched"] = fingerprints(path) == before
    found["left beside"] = [other.name for other in path.parent.glob(f".{path.name}*")]
    if arguments.rank == 0:
        found["consolidated"] = consolidated(path)
    return found


def check_offloaded(arguments: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Load what as many ranks saved without offloading in a learner that offloads, and train on."""
    learner = make(arguments, case, "optimizer_and_parameters")
    learner.load(str(path_of(arguments, case, arguments.world)))
    found = {"weights": weights(learner), "state": optimizer_state(learner)}
    update(learner, 3)
    return {**found, "resumed": weights(learner)}


def check_begin(arguments: argparse.Namespace, case: Case, saved_world: int) -> dict[str, Any]:
    """Begin a run from the weights that `saved_world` ranks saved."""
    found: dict[str, Any] = {}
    path = path_of(arguments, case, saved_world)
    before = fingerprints(path)
    learner = make(arguments, case, init_from=path.parent)
    found["weights"], found["masters"], found["state"] = weights(learner), float32_weights(learner), raw_state(learner)
    found["learner"], found["steps"] = learner.state_dict(), learner.engine.global_steps
    found["state of a new one"] = raw_state(make(arguments, case))
    learner.dry_run()
    found["metrics"] = update(learner, 1)
    found["untouched"] = fingerprints(path) == before
    return found


def check_refusals(arguments: argparse.Namespace) -> dict[str, str]:
    """Why a run can't begin from checkpoints that don't have the weights of its learner."""
    policy, critic = Case("policy", 1, "float32", "untied"), Case("critic", 3, "float32", "reward")
    others = [Case("policy", 2, "float32", model) for model in ("wide", "tied", "llama")]
    return {
        f"{learner.name} from {saved.name}": failure_of(
            lambda learner=learner, saved=saved: make(arguments, learner, init_from=path_of(arguments, saved, 2).parent)
        )
        for learner, saved in ((critic, policy), (policy, critic), *((other, policy) for other in others))
    }


def fingerprints(folder: Path) -> dict[str, str]:
    """A hash of each file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def path_of(arguments: argparse.Namespace, case: Case, world: int) -> Path:
    """The checkpoint of a case."""
    return Path(arguments.out) / f"{case.name}-{world}" / case.role


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--models")
    parser.add_argument("--out")
    parser.add_argument("--phase", choices=("save", "load", "begin"))
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.phase == "save":
        found["writing"] = check_writing(arguments, CASES[arguments.world][0])
    check = {"load": check_load, "begin": check_begin}.get(arguments.phase)
    for case, world in saved_cases(arguments.full):
        if arguments.phase == "begin" and case.lora:
            continue  # a run with adapters begins from a model, and not from a checkpoint
        if check is not None:
            found[f"{case.name} on {world}"] = check(arguments, case, world)
            if arguments.phase == "load" and case.stage == 3 and world == arguments.world:
                found[f"{case.name} on {world}, offloaded"] = check_offloaded(arguments, case)
        elif world == arguments.world:
            found[f"{case.name} on {world}"] = check_save(arguments, case)
    if arguments.phase == "begin":
        found["refused"] = check_refusals(arguments)
    torch.save(found, Path(arguments.out) / f"{arguments.phase}-{arguments.world}-{arguments.rank}.pt")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
