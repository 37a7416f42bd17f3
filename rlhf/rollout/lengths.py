"""How long a response will be, learned from those that are done: per prompt, and for all prompts together.

Invariants (each has a test)
- An expectation is never above the limit, and it is the limit before anything was seen.
- A prompt that was never seen is expected to take what the others took; one that was seen often, what it took itself.
- Disabled, it expects the limit always, so that the order of requests doesn't depend on earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A prompt's own mean and the mean over all weigh the same after this many responses to it: half of a usual group of
# eight, so that one draw of a prompt already counts for more than the others do.
_PRIOR_RESPONSES = 4


class LengthModel:
    """Running means of response lengths, in tokens; memory is one entry for each prompt."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._prompts: dict[str, tuple[int, int]] = {}  # responses, and their tokens
        self._responses = 0
        self._tokens = 0

    def expect(self, prompt_id: str, limit: int) -> float:
        """Expected tokens of a response to this prompt that may take at most `limit`."""
        if not self._enabled or not self._responses:
            return float(limit)
        responses, tokens = self._prompts.get(prompt_id, (0, 0))
        prior = _PRIOR_RESPONSES * self._tokens / self._responses
        return min(float(limit), (tokens + prior) / (responses + _PRIOR_RESPONSES))

    def observe(self, prompt_id: str, tokens: int) -> None:
        """Count a response that ended by itself or at its limit. One that was aborted says nothing about the length."""
        if not self._enabled:
            return
        responses, total = self._prompts.get(prompt_id, (0, 0))
        self._prompts[prompt_id] = (responses + 1, total + tokens)
        self._responses += 1
        self._tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        """Everything that was seen, as JSON can hold it."""
        return {"prompts": {prompt_id: list(seen) for prompt_id, seen in self._prompts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was seen by what `state_dict` returned."""
        self._prompts = {prompt_id: (responses, tokens) for prompt_id, (responses, tokens) in state["prompts"].items()}
        self._responses = sum(responses for responses, _ in self._prompts.values())
        self._tokens = sum(tokens for _, tokens in self._prompts.values())
