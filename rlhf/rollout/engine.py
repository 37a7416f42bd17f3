"""The rollout engine: vLLM's `AsyncLLM` in an actor, ids in, ids and log-probs out.

Invariants
- An engine serves only between a commit and the next begin of a sync; before the first commit it refuses.
- A sync is begin, vLLM's four calls, commit. One that fails in between leaves the engine refusing until a later commit.
- The order of a sync is pause, load, finish, reset of the prefix cache (checked), resume.
- What waits for vLLM ends with it: a call that its dead EngineCore will not answer raises, and nobody waits for a
  deadline to learn of a death that is known.
- Log-probs are those of the distribution that was sampled from; every token carries the version that produced it.
- Where that distribution is not over all tokens (top-k, top-p, a minimum length), the columns say which it was over.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from rlhf.rollout.masks import IncompleteSupport, SampledLogprobs, early_stop_mask, support_mask
from rlhf.rollout.plugin import ACTOR_PID_VARIABLE
from rlhf.rollout.turns import Batch, Turns
from rlhf.rollout.types import SLOTS_PER_ENGINE, Completion, EngineSpec, GenerationRequest, SampleFault, Sampling
from rlhf.tracking.spans import Span, SpanRecorder, now
from rlhf.trajectories import Columns, FinishReason, SamplingMask
from rlhf.weights.endpoint import Declared, Pause

T = TypeVar("T")

_FINISH: Mapping[str | None, FinishReason] = {"stop": "stop", "length": "length"}
# vLLM's CPU default of 128 is longer than most prompts, which then are never shared by the prefix cache.
_CPU_BLOCK_SIZE = 32
# vLLM's own default.
_CPU_BATCH_TOKENS = 2048
_WATCH_S = 0.5
# A process whose death vLLM has noticed may still be on its way out.
_EXIT_S = 2.0


class EngineDied(RuntimeError):
    """vLLM's EngineCore process is gone."""


class NotServing(RuntimeError):
    """The engine has no committed weights."""


class RequestAborted(RuntimeError):
    """The request was given up by who asked."""


class RolloutEngine:
    """One vLLM engine. Plain class; the actor group puts an actor around it."""

    # On the class, since the actor is watched before it is constructed.
    _llm: Any = None

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._version: int | None = None
        self._stop_ids: tuple[int, ...] = ()
        self._vocabulary = 0
        self._death: asyncio.Future[None]
        self._recorder = SpanRecorder("rollout")
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._turns = Turns()
        self._beginning: set[asyncio.Task[None]] = set()
        self._active = 0
        self._busy_since = 0.0

    async def start(self) -> int:
        """Start vLLM and return the number of its workers; takes 30-50 s on two cores."""
        # Read by our plugin in the children that vLLM starts.
        os.environ[ACTOR_PID_VARIABLE] = str(os.getpid())
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with self._recorder.span("engine_start"):
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.spec)))
        self._stop_ids = stop_ids(self._llm)
        self._vocabulary = self._llm.model_config.get_vocab_size()
        self._death = asyncio.ensure_future(self.watch())
        if self.spec.deterministic:
            self._add_in_turn()
        return self.spec.tensor_parallel

    async def generate(self, request: GenerationRequest) -> tuple[Completion, Columns]:
        """Sample one response. Two return values, so that the header and the columns are separate objects.

        Raises `SampleFault` when this request is at fault, and anything else when the engine is.
        """
        serving = self._version
        if serving is None:
            raise NotServing(f"engine {self.spec.index} has no committed weights; it serves after a weight sync")
        self._enter()
        try:
            output = await self._run(request)
            return self._answer(request, output, serving)
        except (ValueError, IncompleteSupport) as error:
            # What vLLM's input processor refuses is a ValueError.
            raise SampleFault(f"request {request.request_id}: {error}") from error
        finally:
            self._leave()

    async def announce(self, request_ids: Sequence[str]) -> None:
        """Have these requests, which may come once this has returned, begin together and in this order.

        Nothing is computed until the last of them is there: what vLLM computes at a time decides how sums are rounded.
        For deterministic engines.
        """
        beginning = asyncio.ensure_future(self._begin(self._turns.announce(request_ids)))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)

    async def _begin(self, batch: Batch) -> None:
        async with self._turns.alone(batch):
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await batch.complete()
            finally:
                await self._llm.resume_generation()

    def _add_in_turn(self) -> None:
        """Let vLLM take in announced requests in their order; its own way there leads through threads."""
        add_request = self._llm.add_request

        async def add_in_turn(request_id: str, *args: Any, **kwargs: Any) -> Any:
            async with self._turns.turn(request_id):
                return await add_request(request_id, *args, **kwargs)

        self._llm.add_request = add_in_turn

    async def abort(self, request_id: str) -> None:
        """Give up a request, wherever it stands; nobody waits for its answer any more. Unknown ones are ignored."""
        self._turns.skip(request_id)
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    def _answer(self, request: GenerationRequest, output: Any, serving: int) -> tuple[Completion, Columns]:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logprobs = SampledLogprobs.from_vllm(completion.logprobs, self._candidates(request.sampling))
        versions = token_versions(completion, len(ids))
        header = Completion(
            request_id=request.request_id,
            response_tokens=len(ids),
            finish_reason=_FINISH.get(completion.finish_reason, "aborted"),
            weight_version=min(versions, default=serving),
            engine=self.spec.index,
        )
        mask = self._mask(request, ids, logprobs)
        return header, Columns.from_completion(request.prompt_ids, ids, logprobs.sampled_R.tolist(), versions, mask)

    def _candidates(self, sampling: Sampling) -> int:
        """`sampling.candidates`, but no more than there are tokens."""
        return min(sampling.candidates, self._vocabulary)

    def _mask(self, request: GenerationRequest, ids: list[int], logprobs: SampledLogprobs) -> SamplingMask | None:
        """What could be sampled; None where everything could, and then nothing was asked for."""
        if not request.sampling.masked:
            return None
        if request.sampling.candidates:
            return support_mask(request.request_id, ids, logprobs)
        stopping = sorted({*self._stop_ids, *request.sampling.stop_token_ids})
        return early_stop_mask(len(ids), request.sampling.min_new_tokens, stopping)

    async def _run(self, request: GenerationRequest) -> Any:
        output = asyncio.ensure_future(self._output(request))
        self._running[request.request_id] = output
        try:
            return await self._alive(output)
        except asyncio.CancelledError:
            # Either it was aborted, or whoever called was cancelled, and then it is being given up only now.
            if output.cancelled():
                raise RequestAborted(f"request {request.request_id} was given up") from None
            raise
        finally:
            del self._running[request.request_id]

    async def _output(self, request: GenerationRequest) -> Any:
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        parameters = sampling_parameters(request.sampling, request.seed, self._candidates(request.sampling))
        # With FINAL_ONLY there is one output, the finished one.
        return [o async for o in self._llm.generate(prompt, parameters, request.request_id)][-1]

    async def _alive(self, call: Awaitable[T]) -> T:
        """Await a call into vLLM, which is never answered once the EngineCore is gone; raises `EngineDied` then."""
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {answer, self._death}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._death.result()
            return answer.result()
        except EngineDeadError as error:
            raise EngineDied(self._describe_death()) from error
        finally:
            answer.cancel()

    def _describe_death(self) -> str:
        processes = self._llm.engine_core.resources.engine_manager.processes
        states = []
        for process in processes:
            process.join(_EXIT_S)
            code = process.exitcode
            how = (
                "has not ended yet"
                if code is None
                else f"killed by signal {-code}"
                if code < 0
                else f"exit code {code}"
            )
            states.append(f"{process.name} (pid {process.pid}): {how}")
        return (
            f"rollout engine {self.spec.index}: vLLM's engine process died: {'; '.join(states)}. What it said last is "
            f"in logs/rollout-{self.spec.index}.log"
        )

    # The sync. The four methods in the middle are vLLM's protocol, driven by `rlhf.weights.client.EngineClient`.

    async def begin_sync(self, pause: Pause) -> None:
        """Stop serving; what comes later is refused until the commit.

        What runs is finished first (`drain`), or held and continued by the new weights after the commit (`keep`): then
        vLLM forgets its keys and values, which come from the old weights, and computes them anew.
        """
        # First, so that a request which comes during the pause is refused and not held for the new weights.
        self._version = None
        # With the cache cleared, requests that are held give up their blocks. Otherwise they would go on from the old
        # weights' keys and values, and the reset at the commit would do nothing.
        await self._alive(self._llm.pause_generation(mode="wait" if pause == "drain" else "keep", clear_cache=True))
        await self._alive(self._llm.collective_rpc("abandon_weight_update"))

    async def weight_disagreements(self, declared: Sequence[Declared]) -> list[str | None]:
        """For each worker what speaks against loading the declared tensors, None where nothing does."""
        if self._version is not None:
            raise NotServing(f"engine {self.spec.index} is serving; what it can load is tried before it does")
        # vLLM's own way to its workers takes plain data only.
        plain = [(d.name, d.dtype, d.shape) for d in declared]
        found: list[str | None] = await self._alive(self._llm.collective_rpc("weight_disagreement", args=(plain,)))
        return found

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the transfer group."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._alive(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    async def start_weight_update(self) -> None:
        """Open the update; refused unless the engine is in a sync."""
        if self._version is not None:
            raise NotServing(f"engine {self.spec.index} is serving; begin_sync comes before a weight update")
        await self._alive(self._llm.start_weight_update())

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load what `update_info` declares."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._recorder.span("receive_weights"):
            await self._alive(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    async def finish_weight_update(self) -> None:
        """Complete the layers."""
        await self._alive(self._llm.finish_weight_update())

    async def weight_receipts(self) -> list[dict[str, Any]]:
        """The receipt of the last sync from every worker."""
        receipts: list[dict[str, Any]] = await self._alive(self._llm.collective_rpc("weight_receipt"))
        return receipts

    async def leave_transfer(self) -> None:
        """Leave the transfer group."""
        await self._alive(self._llm.collective_rpc("leave_transfer"))

    async def commit_sync(self, version: int) -> None:
        """Serve again, with these weights as `version`. Raises when cached KV of the old weights can't be dropped."""
        if not await self._alive(self._llm.reset_prefix_cache()):
            raise RuntimeError(f"engine {self.spec.index}: the prefix cache was not reset; old KV would be served")
        await self._alive(self._llm.update_weight_version(str(version)))
        await self._alive(self._llm.resume_generation())
        self._version = version

    # Supervision and timing

    async def watch(self) -> None:
        """Raise `EngineDied` when vLLM's processes are gone, also while nobody asks anything of the engine."""
        while self._llm is None or not self._llm.errored:  # noqa: ASYNC110  vLLM offers a flag, and no event
            await asyncio.sleep(_WATCH_S)
        raise EngineDied(self._describe_death())

    async def probe(self) -> None:
        """Return when every worker of the engine has answered: vLLM's own processes too are alive and not stuck."""
        await self._alive(self._llm.collective_rpc("check_health"))

    async def drain_spans(self) -> list[Span]:
        """Spans since the last call."""
        return self._recorder.drain()

    async def close(self) -> None:
        """Shut vLLM down with its child processes."""
        if self._llm is not None:
            self._llm.shutdown()

    def _enter(self) -> None:
        if self._active == 0:
            self._busy_since = now()
        self._active += 1

    def _leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._recorder.record("generate", start=self._busy_since)


def token_versions(completion: Any, tokens: int) -> list[int]:
    """The weight version of each sampled token, from vLLM's spans; raises when a token is in none."""
    versions = [-1] * tokens
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
    if -1 in versions:
        raise RuntimeError(f"vLLM did not say which weights sampled token {versions.index(-1)} of a response")
    return versions


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The arguments of vLLM's engine, each with its reason."""
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": SLOTS_PER_ENGINE,
        "load_format": "dummy" if spec.load_dummy_weights else "auto",
        # The distribution that was sampled from, temperature applied; vLLM's default is the raw one.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": spec.max_logprobs,
        "enable_prefix_caching": not spec.deterministic,
        "weight_transfer_config": {"backend": spec.weight_backend},
        "worker_extension_cls": "rlhf.rollout.plugin.WorkerExtension",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if spec.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    elif spec.device == "cpu":
        # In one process with EngineCore. vLLM would replace the short name, "uni", by a worker process of its own, to
        # set OpenMP's environment there, which is set already; the two wait for each other in loops, on the cores that
        # the model needs.
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    if spec.device == "cpu":
        # Compilation costs a minute at start and gains nothing at these sizes.
        arguments |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": spec.kv_cache_bytes,
            # A prompt that is prefilled in parts asks torch for a random generator at an offset, which it lacks on
            # CPU: EngineCore dies. Undivided, the longest prompt has to fit into one pass.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, spec.max_model_len),
        }
    else:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
    return arguments


def stop_ids(llm: Any) -> tuple[int, ...]:
    """The ids that end a response, which vLLM masks for the first `min_tokens` tokens: asked of vLLM itself.

    They are the tokenizer's end of sequence and those of the model's generation config.
    """
    from vllm import SamplingParams

    parameters = SamplingParams()
    processor = llm.input_processor
    # What the input processor does to the parameters of every request.
    parameters.update_from_generation_config(processor.generation_config_fields, processor.renderer.get_eos_token_id())
    return tuple(sorted(parameters.all_stop_token_ids))


def sampling_parameters(sampling: Sampling, seed: int, candidates: int) -> Any:
    """vLLM's parameters of one request that lists the `candidates` likeliest tokens at each place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        seed=seed if sampling.temperature > 0 else None,
        # With 0 the sampled token's own log-prob, nothing more.
        logprobs=candidates,
        # A few lists for a response instead of an object for each log-prob.
        flat_logprobs=True,
        # Text is made from ids where it is needed; only stop strings make vLLM detokenise.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
