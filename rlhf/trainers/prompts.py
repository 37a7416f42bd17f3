"""The prompts of a run, loaded before any actor starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.config.schema import Config
from rlhf.data import DataError, PromptSampler, load_prompts, load_tokenizer
from rlhf.trajectories import Prompt, PromptDraw


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The training sampler and the held-out prompts.

    `dropped` and `held_out_dropped` count prompts that were too long, `held_back` training prompts that are among the
    held-out ones: what is evaluated on is never trained on.
    """

    train: PromptSampler
    prompts: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    dropped: int
    held_back: int
    held_out_dropped: int

    @staticmethod
    def load(config: Config) -> RunPrompts:
        """Read and tokenise all prompts; raises what the data room raises, naming file and line."""
        tokenizer = load_tokenizer(config.model.path)
        loaded = load_prompts(config.data.prompts, config.data, tokenizer)
        held_out, held_out_dropped = list[Prompt](), 0
        if config.evaluation is not None:
            evaluation = load_prompts(config.evaluation.prompts, config.data, tokenizer)
            held_out, held_out_dropped = evaluation.prompts, evaluation.dropped
        unseen = {prompt.token_ids for prompt in held_out}
        prompts = [prompt for prompt in loaded.prompts if prompt.token_ids not in unseen]
        if not prompts:
            raise DataError(
                "data.prompts: every training prompt is also in evaluation.prompts, so none is left to train on"
            )
        sampler = PromptSampler(prompts, config.run.seed, config.data.shuffle)
        return RunPrompts(
            sampler, prompts, held_out, loaded.dropped, len(loaded.prompts) - len(prompts), held_out_dropped
        )

    def notes(self) -> list[str]:
        """What a person should know about the data before the run begins."""
        parts = [f"{len(self.prompts)} training prompts"]
        if self.dropped:
            parts.append(f"{self.dropped} more were longer than data.max_prompt_tokens and dropped")
        if self.held_out_dropped:
            parts.append(f"{self.held_out_dropped} held-out ones were too long and dropped")
        if self.held_back:
            parts.append(f"{self.held_back} more are among the {len(self.evaluation)} held-out ones and left out")
        return ["; ".join(parts)]

    def peek(self, count: int) -> list[PromptDraw]:
        """The first prompts of the data, without drawing them: for the parity probe."""
        return _as_draws(self.prompts[:count])

    def held_out(self) -> list[PromptDraw]:
        """Every held-out prompt once, in a fixed order."""
        return _as_draws(self.evaluation)


def _as_draws(prompts: Sequence[Prompt]) -> list[PromptDraw]:
    return [PromptDraw(prompt, draw_index=index, epoch=0) for index, prompt in enumerate(prompts)]
