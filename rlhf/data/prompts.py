"""Prompts, ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema import DataConfig, PromptSource
from rlhf.data.errors import DataError, listed
from rlhf.data.render import Tokenizer, check_template, render
from rlhf.data.sources import read_rows
from rlhf.trajectories import Prompt


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """The prompts in the order of their source, and how many were dropped as too long."""

    prompts: list[Prompt]
    dropped: int


def load_prompts(source: PromptSource, data: DataConfig, tokenizer: Tokenizer) -> LoadedPrompts:
    """Read, render and tokenise every row of `source`.

    Prompts longer than `data.max_prompt_tokens` are an error or are dropped, as `data.overlong_prompts` says. Raises
    `DataError` for those, for rows that can't be used, and where no prompt is left.
    """
    check_template(data, tokenizer)
    prompts: list[Prompt] = []
    overlong: list[str] = []
    problems: list[str] = []
    for row in read_rows(source):
        try:
            ids = render(row, data, tokenizer)
        except DataError as error:
            problems.append(str(error))
            continue
        if len(ids) > data.max_prompt_tokens:
            overlong.append(f"prompt {row.prompt_id} ({row.place}): {len(ids)} tokens")
        else:
            prompts.append(Prompt(row.prompt_id, row.text, ids, row.fields))
    if problems:
        raise DataError(f"{len(problems)} unusable prompts:\n{listed(problems)}")
    limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    if overlong and data.overlong_prompts == "error":
        raise DataError(
            f"{len(overlong)} prompts are longer than {limit}:\n{listed(overlong)}\n"
            "Raise the limit, or set data.overlong_prompts: drop"
        )
    if not prompts:
        raise DataError(f"no prompt is left: all {len(overlong)} are longer than {limit}")
    return LoadedPrompts(prompts, len(overlong))
