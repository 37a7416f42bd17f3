"""Which settings may differ between a checkpoint and the run that resumes from it.

Invariants
- Every key has a decision: its own, or that of the nearest section above it. What nobody decided breaks a resume.
- A change that breaks the meaning of "the same run" is refused, and the reason given; any other is shown.
- A key that the saved configuration doesn't know, since an earlier version wrote it, is no change while it has its
  default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from rlhf.checkpoint.manifest import plain_config
from rlhf.config import keys

ABSENT = "absent"


class Decision(NamedTuple):
    """Whether a change breaks a resume, and why; for one that doesn't, what there is to know (if anything)."""

    breaks: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs; `old` or `new` is `ABSENT` where one side doesn't have it."""

    key: str
    old: Any
    new: Any
    breaks: bool
    reason: str


_FREE = Decision(False)
_FROM_HERE_ON = Decision(False, "holds from here on")
_BATCH = Decision(True, "a step is a batch of that size: steps, data position and ledger count in it")
_OBJECTIVE = Decision(True, "it is what the run optimises; the optimizer's and controllers' states belong to it")
_SAMPLED = Decision(True, "samples before and after would not be of one distribution, and some may be waiting")
_DATA = Decision(True, "the data position is a place in this very stream of prompts")
_MODEL = Decision(True, "weights, optimizer state and token ids belong to it")
_STAGE = Decision(True, "the shards are cut as this stage needs them")
_RANKS = Decision(False, "the shards are converted to it")

# A dotted key stands for all below it, unless one of those has a decision of its own.
DECISIONS: Mapping[str, Decision] = {
    "task": Decision(True, "another kind of training has another state"),
    "run": _FREE,
    "run.seed": Decision(True, "data order and every sample's random stream follow from it"),
    "run.steps": Decision(False, "linear and cosine learning rates now end there"),
    "run.deterministic": Decision(False, "results repeat bit for bit only if all steps were made so"),
    "model": _MODEL,
    "data": _DATA,
    "rollout": _FREE,
    "rollout.prompts_per_step": _BATCH,
    "rollout.samples_per_prompt": _BATCH,
    "rollout.max_new_tokens": _SAMPLED,
    "rollout.min_new_tokens": _SAMPLED,
    "rollout.sampling": _SAMPLED,
    "rollout.on_error": _FROM_HERE_ON,
    "rollout.over_generation": _FROM_HERE_ON,
    "rollout.dynamic_sampling": _FROM_HERE_ON,
    "algorithm": _OBJECTIVE,
    "reward": _OBJECTIVE,
    "reward.on_error": _FROM_HERE_ON,
    "reward.timeout_s": _FREE,
    "reward.workers": _FREE,
    "reward.model.ranks": _FREE,
    "reward.model.sharded": _FREE,
    "reward.model.deadline_s": _FREE,
    # Learners: what the optimizer does from here on may be steered; what its state is made of may not.
    "policy": _FROM_HERE_ON,
    "policy.learning_rate": Decision(False, "holds from here on; the schedule goes on at its place"),
    "policy.ranks": _RANKS,
    "policy.sequence_parallel": _FREE,
    "policy.zero_stage": _STAGE,
    "policy.lora": _MODEL,
    "policy.max_tokens_per_microbatch": _FREE,
    "policy.longer_sequences": _FREE,
    "policy.activation_checkpointing": _FREE,
    "policy.offload": _FREE,
    "policy.offload_to": _FREE,
    "policy.deadline_s": _FREE,
    "critic": _FROM_HERE_ON,
    "critic.learning_rate": Decision(False, "holds from here on; the schedule goes on at its place"),
    "critic.ranks": _RANKS,
    "critic.sequence_parallel": _FREE,
    "critic.zero_stage": _STAGE,
    "critic.max_tokens_per_microbatch": _FREE,
    "critic.longer_sequences": _FREE,
    "critic.activation_checkpointing": _FREE,
    "critic.offload": _FREE,
    "critic.offload_to": _FREE,
    "critic.deadline_s": _FREE,
    "critic.model": _MODEL,
    "critic.warmup_batches": Decision(False, "they came before step 1 and are not made again"),
    "reference": _FREE,
    "evaluation": _FREE,
    "evaluation.prompts": Decision(True, "held-out prompts are taken out of the training data, whose stream changes"),
    "evaluation.temperature": Decision(False, "evaluations before and after can't be compared"),
    "placement": _FREE,
    "weights": _FREE,
    "fault_tolerance": _FREE,
    "checkpoint": _FREE,
    "tracking": _FREE,
}
_UNDECIDED = Decision(True, "nobody has decided that it may change")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every key that differs, in the order of `now`, then those that only `saved` has; secrets are not compared."""
    before, after = plain_config(saved), plain_config(now)
    old, new = dict(_leaves(before, ())), dict(_leaves(after, ()))
    found = []
    for path in dict.fromkeys([*new, *old]):
        was, is_ = old.get(path, ABSENT), new.get(path, ABSENT)
        if was != is_ and not (path not in old and _is_new_default(path, is_, before)):
            decision = _decision(path, after)
            found.append(Change(".".join(path), was, is_, decision.breaks, decision.reason))
    return found


def breaking(changes: Sequence[Change]) -> list[Change]:
    """The changes with which this is not the same run."""
    return [change for change in changes if change.breaks]


def explain(changes: Sequence[Change]) -> list[str]:
    """The changes as lines for a person: those that are refused first, each with its reason."""
    ordered = sorted(changes, key=lambda change: not change.breaks)
    return [_line(change) for change in ordered]


def _line(change: Change) -> str:
    reason = f": {change.reason}" if change.reason else ""
    remedy = ". Set it back, or begin a new run with checkpoint.init_from" if change.breaks else ""
    verdict = "refused" if change.breaks else "changed"
    return f"{verdict}  {change.key}: {change.old!r} -> {change.new!r}{reason}{remedy}"


def _decision(path: Sequence[str], now: Mapping[str, Any]) -> Decision:
    for length in range(len(path), 0, -1):
        decision = DECISIONS.get(".".join(path[:length]))
        if decision is _RANKS and (now.get("checkpoint") or {}).get("on_world_size_change") == "error":
            return Decision(True, "the shards are one a rank, and checkpoint.on_world_size_change is error")
        if decision is not None:
            return decision
    return _UNDECIDED


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its key path; an empty mapping or list is a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(index)))
    else:
        yield path, value


def _is_new_default(path: tuple[str, ...], value: Any, saved: Mapping[str, Any]) -> bool:
    """Whether a key that `saved` lacks has its default, in a section that `saved` has or knows nothing of."""
    here: Any = saved
    for part in path[:-1]:
        if not isinstance(here, Mapping) or part not in here:
            break
        here = here[part]
    if not isinstance(here, Mapping):
        return False
    field = keys.field_at([int(part) if part.isdigit() else part for part in path])
    if field is None:
        return False
    default = field.get_default(call_default_factory=True)
    return default is not PydanticUndefined and bool(plain_config({"": default})[""] == value)
