"""The reward functions that come with the package.

Each is `f(samples, **options)`; the annotations of the options are what a configuration is checked against. An answer
that isn't found scores 0; a row that can't be scored at all (it has no expected answer) is an error and not a 0.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhf.rewards.extract import Extract, Normalise, equal, find_answer, unbox
from rlhf.rewards.types import RewardFunction, RewardInput


def reasoning_gym(
    samples: Sequence[RewardInput], *, extract: Literal["last_number", "tag", "whole"] = "last_number"
) -> list[float]:
    """The score that reasoning-gym itself gives the extracted answer, usually from 0 to 1.

    Needs rows of `source: reasoning_gym`. Nothing extracted scores 0.
    """
    return [_reasoning_gym_score(sample, extract) for sample in samples]


def _reasoning_gym_score(sample: RewardInput, how: Extract) -> float:
    problem = sample.fields.get("reasoning_gym")
    if problem is None:
        raise ValueError(
            "the row has no reasoning-gym problem in its field 'reasoning_gym': use this function with "
            "data.prompts.source: reasoning_gym, or exact_match for rows that have an answer"
        )
    answer = find_answer(sample.response, how)
    if answer is None:
        return 0.0
    scorer = _scorer(problem["task"], json.dumps(problem.get("options", {}), sort_keys=True))
    return float(scorer(answer, problem["entry"]))


@functools.cache
def _scorer(task: str, options: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The task's `score_answer`, built once in each worker: some tasks load word lists when they are made."""
    from reasoning_gym.factory import create_dataset

    score: Callable[[str, Mapping[str, Any]], float] = create_dataset(task, **json.loads(options)).score_answer
    return score


def exact_match(
    samples: Sequence[RewardInput],
    *,
    extract: Extract = "whole",
    answer_extract: Extract = "whole",
    normalise: Normalise = "number",
) -> list[float]:
    r"""1 where the extracted response equals the row's `answer` (any of them, if it is a list), otherwise 0.

    `extract` says where the answer stands in the response, `answer_extract` where it stands in the row: `hashes` for
    GSM8K, whose answers end in `#### 42`. An answer on either side that is nothing but `\boxed{42}` is taken as 42.
    """
    return [
        _match(find_answer(sample.response, extract), _expected(sample, answer_extract), normalise)
        for sample in samples
    ]


def _match(given: str | None, expected: list[str], normalise: Normalise) -> float:
    return float(given is not None and any(equal(unbox(given), answer, normalise) for answer in expected))


def _expected(sample: RewardInput, how: Extract) -> list[str]:
    """The row's answers as texts; raises where there is none, since nothing could be scored against it."""
    answer = sample.fields.get("answer")
    if answer is None:
        raise ValueError("the row has no 'answer': name its field with data.prompts.answer")
    found = []
    for one in answer if isinstance(answer, list | tuple) else [answer]:
        text = find_answer(str(one), how)
        if text is None:
            raise ValueError(f"the row's answer {str(one)!r} has nothing that answer_extract: {how} finds")
        if not unbox(text).strip():
            raise ValueError("the row's 'answer' is empty: nothing can be compared with it")
        found.append(unbox(text))
    if not found:
        raise ValueError("the row's 'answer' is an empty list: nothing can be compared with it")
    return found


def regex(
    samples: Sequence[RewardInput],
    *,
    pattern: str,
    answer_group: int | str | None = None,
    normalise: Normalise = "number",
) -> list[float]:
    """1 where `pattern` is found in the response, otherwise 0.

    With `answer_group`, that group of the last match has to equal the row's `answer` as well.
    """
    compiled = re.compile(pattern)
    scores = []
    for sample in samples:
        matches = list(compiled.finditer(sample.response))
        if not matches or answer_group is None:
            scores.append(float(bool(matches)))
        else:
            scores.append(_match(matches[-1].group(answer_group), _expected(sample, "whole"), normalise))
    return scores


def length(
    samples: Sequence[RewardInput], *, target: int, penalty: float = 1.0, shorter_is_fine: bool = False
) -> list[float]:
    """0 for a response of `target` tokens, and `penalty` less for each further `target` tokens that it is away.

    score = -penalty * |tokens - target| / target; with `shorter_is_fine` only for what is longer.
    """
    scores = []
    for sample in samples:
        away = len(sample.response_ids) - target
        away = max(away, 0) if shorter_is_fine else abs(away)
        scores.append(-penalty * away / target if away else 0.0)
    return scores


BUILT_IN: Mapping[str, RewardFunction] = {
    "reasoning_gym": reasoning_gym,
    "exact_match": exact_match,
    "regex": regex,
    "length": length,
}

# Workers import these before they say that they are ready: seconds that must not count as a call's.
IMPORTS: Mapping[str, str] = {"reasoning_gym": "reasoning_gym.factory"}


def check_options(name: str, options: Mapping[str, Any]) -> str | None:
    """What is wrong with options that have the right names and types, or None."""
    if name == "regex":
        try:
            compiled = re.compile(options["pattern"])
        except re.error as error:
            return f"pattern {options['pattern']!r} is not a regular expression ({error}): correct it"
        group = options.get("answer_group")
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if group is not None and group not in known:
            return f"answer_group {group!r} is not a group of pattern {options['pattern']!r}: use one of {known}"
    if name == "length" and options["target"] < 1:
        return f"target {options['target']} must be at least 1 token"
    return None
