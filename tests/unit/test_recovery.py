"""Attempts after a lost process: when there is another, and where it begins."""

from types import SimpleNamespace

import pytest

from rlhf.cluster.supervision import ActorFailed
from rlhf.cluster.wait import DeadlineExceeded
from rlhf.data import PromptSampler
from rlhf.trainers.recovery import Recovery
from rlhf.trajectories import Prompt
from tests.unit.configs import build

LOST = ActorFailed("policy rank 1 was killed by SIGKILL", role="policy", rank=1, lost=True)
RAISED = ActorFailed("policy rank 0 raised", role="policy", rank=0, cause=ValueError("no"))


class Bench:
    def __init__(self, restarts, *, saved=None):
        self.log = []
        prompts = [Prompt(f"p{i}", "", (i,)) for i in range(3)]
        self.sampler = PromptSampler(prompts, seed=1)
        store = SimpleNamespace(clean=lambda: self.log.append("clean"), choose=lambda resume, say: saved)
        config = build({"fault_tolerance.max_restarts": restarts})
        self.recovery = Recovery(config, self.sampler, store, lambda line: self.log.append(line))

    async def run(self, *failures, begin=None):
        rest = list(failures)

        async def attempt(checkpoint):
            self.log.append(("attempt", checkpoint, self.sampler.state_dict()["next"]))
            self.sampler.draw(2)
            if rest:
                raise rest.pop(0)
            return "done"

        async def end_actors():
            self.log.append("ended")

        return await self.recovery.run(attempt, end_actors, begin)


@pytest.mark.parametrize("loss", [LOST, DeadlineExceeded("policy: update of step 3: not done after 600 s")])
async def test_after_a_loss_everything_ends_and_the_run_goes_on_from_the_last_checkpoint(loss):
    bench = Bench(1, saved="step-000004")
    assert await bench.run(loss) == "done"
    assert bench.log == [
        ("attempt", None, 0),
        f"restart 1 of 1: {loss}",
        "ended",
        "clean",
        # The prompts are where the first attempt found them; the checkpoint brings their own position.
        ("attempt", "step-000004", 0),
    ]


async def test_without_a_checkpoint_it_begins_where_the_run_began():
    bench = Bench(2)
    assert await bench.run(LOST, LOST, begin="somebody elses step-000010") == "done"
    begins = [entry[1] for entry in bench.log if entry[0] == "attempt"]
    assert begins == ["somebody elses step-000010"] * 3


async def test_a_loss_beyond_the_limit_ends_the_run_with_it():
    bench = Bench(1)
    with pytest.raises(ActorFailed, match="killed by SIGKILL"):
        await bench.run(LOST, LOST)
    assert sum(entry[0] == "attempt" for entry in bench.log) == 2


async def test_no_restart_is_the_default():
    bench = Bench(0)
    with pytest.raises(ActorFailed):
        await bench.run(LOST)


async def test_what_an_actor_raised_is_not_tried_again():
    bench = Bench(3)
    with pytest.raises(ActorFailed, match="raised"):
        await bench.run(RAISED)
    assert len(bench.log) == 1
