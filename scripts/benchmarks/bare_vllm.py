"""vLLM's `AsyncLLM` with nothing of ours around it: the peer that `rollout.py` compares with, in its own process.

`rollout.py` starts it with one end of a pipe and writes a list to it: first `[spec]`, then the requests of each round,
all submitted at once; an empty list ends it. Answers: `None` when the engine is up, and `(tokens, seconds)` a round.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from rlhf.cluster.process import die_with_parent
from rlhf.rollout.engine import engine_arguments, sampling_parameters
from rlhf.rollout.plugin import ACTOR_PID_VARIABLE
from rlhf.rollout.types import GenerationRequest


async def serve(connection: Connection) -> None:
    """Start the engine, and answer until told to end."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    [spec] = connection.recv()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))
    try:
        connection.send(None)
        while requests := await asyncio.to_thread(connection.recv):
            began = time.perf_counter()
            tokens = await asyncio.gather(*(generate(llm, request) for request in requests))
            connection.send((sum(tokens), time.perf_counter() - began))
    finally:
        llm.shutdown()


async def generate(llm: Any, request: GenerationRequest) -> int:
    """Have one request answered; returns the length of the response."""
    prompt = {"prompt_token_ids": list(request.prompt_ids)}
    parameters = sampling_parameters(request.sampling, request.seed, request.sampling.candidates)
    outputs = [output async for output in llm.generate(prompt, parameters, request.request_id)]
    return len(outputs[-1].outputs[0].token_ids)


def main() -> None:
    """Serve on the pipe whose file descriptor is the argument."""
    die_with_parent()
    # Our plugin ties vLLM's own child process to this one.
    os.environ[ACTOR_PID_VARIABLE] = str(os.getpid())
    asyncio.run(serve(Connection(int(sys.argv[1]))))


if __name__ == "__main__":
    main()
