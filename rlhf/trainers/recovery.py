"""What a run does when one of its processes is lost: it starts its roles again and goes on from the last checkpoint.

Invariants
- Only losses are recovered from: a process that died, can't be reached, or didn't answer by its deadline. What an
  actor raised would be raised again, so it ends the run, as does a loss when `fault_tolerance.max_restarts` is used up.
- Everything of the attempt before has ended before the next one begins.
- The next attempt begins from the newest checkpoint that can be loaded, or where the run itself began if there is none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rlhf.checkpoint import Checkpoint, CheckpointStore
from rlhf.cluster.supervision import ActorFailed
from rlhf.cluster.wait import DeadlineExceeded
from rlhf.config.schema import Config
from rlhf.data import PromptSampler

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """What the loop itself remembers: `moved` counts steps that changed the model."""

    moved: int = 0

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return {"moved": self.moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self.moved = int(state["moved"])


class Recovery:
    """Runs attempts until one is done; each finds `prompts` where the first one did."""

    def __init__(
        self, config: Config, prompts: PromptSampler, store: CheckpointStore, say: Callable[[str], None]
    ) -> None:
        self._restarts = config.fault_tolerance.max_restarts
        self._prompts = prompts
        self._start = prompts.state_dict()
        self._store = store
        self._say = say

    async def run(
        self,
        attempt: Callable[[Checkpoint | None], Awaitable[T]],
        end_actors: Callable[[], Awaitable[None]],
        begin: Checkpoint | None,
    ) -> T:
        """The result of the first attempt that gets to its end; `begin` is where the first one begins."""
        first = begin
        for number in range(1, self._restarts + 2):
            try:
                return await attempt(begin)
            except (ActorFailed, DeadlineExceeded) as error:
                if number > self._restarts or not is_loss(error):
                    raise
                self._say(f"restart {number} of {self._restarts}: {error}")
            await end_actors()
            self._store.clean()
            begin = self._store.choose("auto", self._say) or first
            self._prompts.load_state_dict(self._start)
        raise AssertionError("the last attempt returns or raises")


def is_loss(error: BaseException) -> bool:
    """Whether a process was lost, and not something raised by code that would raise it again."""
    return isinstance(error, DeadlineExceeded) or (isinstance(error, ActorFailed) and error.lost)
