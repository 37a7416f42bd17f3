"""What a run needs: devices and bytes for each pool. Pure arithmetic, shared by the preflight and the planner.

Invariants (each has a test)
- The same configuration and shape give the same needs, without ray, torch or any I/O.
- A pool that the configuration doesn't use is absent: no reference without KL or with LoRA, no critic without gae.
- Bytes are per device; summed over ranks, a state sharded by ZeRO adds up to one whole copy.
- A critic or reward model from a checkpoint of its own is counted with that checkpoint's shape.
- What can't work on any cluster (heads that don't divide, a KV cache too small for one sequence) is a problem.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Literal

from rlhf.cluster.model_shape import ModelShape, UnknownShape
from rlhf.config.catalogue import has_reference_pool, needs_critic
from rlhf.config.schema import Config, LearnerConfig, LoraConfig

__all__ = ["DeviceBytes", "ModelShape", "Needs", "PoolNeeds", "UnknownShape", "needs"]

Device = Literal["cpu", "cuda"]

FLOAT32 = 4
# AdamW keeps two moments in float32 beside the float32 master weights.
OPTIMIZER_BYTES = 3 * FLOAT32
# Log-probs are computed in chunks of at most this many logits, a few float32 arrays of that size at a time.
LOGIT_CHUNK = 1 << 25
LOGIT_ARRAYS = 3
# Elements: what ZeRO stage 3 has whole beside what it computes with (gathered ahead, and kept for a use that is near),
# and the buffer that gradients are reduced from.
NEAR_ELEMENTS = 100_000_000
REDUCE_BUCKET_ELEMENTS = 50_000_000
# Elements of a rank's optimizer state that are read from a disk at a time.
SUB_GROUP_ELEMENTS = 25_000_000
# On CPU: freed arrays that glibc's heap keeps, as a share of what the layers keep for the backward pass, since the next
# micro-batch's don't fit into the gaps. Measured (docs/performance.md, Memory): 0.42 to 0.45 in bfloat16. Of what stage
# 3 gathers it keeps as much as is whole at a time.
HEAP_SHARE = 0.4
# vLLM's defaults: tokens of one forward pass, and sequences that are sampled from at a time.
ENGINE_BATCH_TOKENS = 2048
ENGINE_BATCH_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes on one device, by what they hold."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    heap: int = 0
    kv_cache: int = 0
    sync_buckets: int = 0
    checkpoint: int = 0

    @property
    def total(self) -> int:
        """Their sum, bytes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """One pool: `units` ranks (or engines, or worker processes) of `devices_per_unit` devices each.

    `host_bytes` is what a unit keeps in its host's memory beside its devices' own.
    """

    pool: str
    units: int
    devices_per_unit: int
    bytes: DeviceBytes
    host_bytes: int = 0
    problems: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of the whole pool."""
        return self.units * self.devices_per_unit

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool on all its devices."""
        return self.devices * self.bytes.total


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs, pool by pool. On CPU a device is a slot."""

    device: Device
    pools: tuple[PoolNeeds, ...]

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools, over all devices."""
        return sum(pool.total_bytes for pool in self.pools)

    @property
    def host_bytes(self) -> int:
        """Bytes of all pools in their hosts' memory, beside the devices'."""
        return sum(pool.units * pool.host_bytes for pool in self.pools)

    @property
    def problems(self) -> tuple[str, ...]:
        """What can't work on any cluster."""
        return tuple(problem for pool in self.pools for problem in pool.problems)

    def pool(self, name: str) -> PoolNeeds | None:
        """The pool of that name, if the run has one."""
        return next((pool for pool in self.pools if pool.pool == name), None)


def needs(
    config: Config,
    shape: ModelShape,
    device: Device = "cpu",
    critic_shape: ModelShape | None = None,
    reward_shape: ModelShape | None = None,
) -> Needs:
    """Devices and bytes for each pool of a run.

    `shape` is the policy's; `critic_shape` and `reward_shape` are those of checkpoints of their own, and without them
    the critic has the shape of where it starts from and the reward model has the policy's.

    With P parameters, R ranks, c bytes of the compute dtype (2 for bfloat16, 4 for float32), L layers, hidden size h,
    MLP size I, a = heads x head size, k = KV heads x head size, V vocabulary, and T tokens in the largest micro-batch
    (the cap, or the longest sequence if that is longer; of a learner that part of them which one rank has, a share by
    `sequence_parallel`):

    - policy weights: c P at ZeRO 1 and 2, c P / R at 3; gradients, accumulated in float32: 4 P at 1, and those of the
      last micro-batch in bfloat16 beside them, 4 P / R at 2 and 3; optimizer, float32 masters and two moments:
      12 P / R (ZeRO paper, arXiv:1910.02054, section 5, table 1).
      At 3 there are whole as well the largest part that is gathered at a time, one layer or the embedding, and 10^8
      parameters that are ahead of their use or near the next one: c min(P, largest + 10^8).
    - policy activations, no recomputation: T L (2 (4 + c) h + c (2 h + 3 a + 3 k + 4 I)), which is the float32 input
      and the output of each norm, the residual stream, queries and keys before and after rotation, values, the
      attention output and four MLP arrays (after Korthikanti et al., arXiv:2205.05198, section 4). On CPU attention is
      float32 and keeps what it was given, with S samples of a prompt the keys and values of each with its prompt:
      c a + 4 (2 a + 2 k) in place of c (3 a + 3 k), with S > 1 another 8 k S (p + n) / (p + S n) for the longest
      prompt p and response n. Plus the logits of one chunk, the float32 gradient of the output head, and the float32
      buffer that gradients are reduced from, of 5 10^7 elements: 1 and 2 fill no more than P of them, 3 has all, and
      sends a copy where there are other ranks.
      With activation checkpointing L layers become one, the one that is computed again, plus T L c h for the inputs of
      all (ibid., section 5).
      On CPU there is heap beside them: two fifths of what layers keep, without the logits and gradients named last,
      and at 3 what is whole at a time once more.
      Offloaded optimizer state has its gradients twice, as they are added up and as the optimizer gets them: 8 P / R.
      On a disk it is but for gradients as they are added up, 4 P / R, and masters, moments and gradients of one
      sub-group: 16 min(P / R, 2.5 10^7 + its last parameter's share).
      With GPUs all that, and offloaded weights, are in the host's memory and nothing of them on the device.
    - policy with LoRA, A the parameters of the adapters, r (inputs + outputs) for each layer that has one: weights
      c (P + A) in place of c P; gradients and optimizer as above with A in place of P; no gradient of the output head;
      r outputs of each adapter more to keep for each token; and at a sync one merged matrix in float32.
    - critic: as the policy, with its own settings and P without the output head but with h for the value head; one
      value a token instead of logits.
    - reference: weights c P on every rank; activations of one layer, T c (4 h + 3 a + 3 k + 3 I), plus a logits chunk.
      Sharded: weights as the policy's at ZeRO 3.
    - reward_model: as the reference in its own dtype, with P as the critic's, and no logits.
    - rollout, tensor parallel t: weights c P / t; one layer's activations at vLLM's batch size plus sampled logits;
      KV cache as configured on CPU; on a GPU the least that serves: the longest sequence, 2 L k c / t bytes a token.
    - sync buckets: two on both sides, each at least the largest tensor; at ZeRO 3 the policy has what is gathered at a
      time, one layer or the embedding, in place of the second where that is more.
    - checkpoint, with `checkpoint.every` and on CPU: a copy of a learner's weights that are trained, and of its
      optimizer; it is written while training goes on (on a GPU the copy is in the host's memory).
    - reward: worker processes of reward functions on the CPU, no devices.
    """
    pools = [_policy(config, shape, device)]
    if needs_critic(config):
        start = reward_shape if config.critic.model == "reward" else None
        pools.append(_critic(config, critic_shape or start or shape, device))
    if has_reference_pool(config):
        pools.append(_reference(config, shape))
    if config.reward.model is not None:
        pools.append(_reward_model(config, reward_shape or shape))
    pools.append(_rollout(config, shape, device))
    if config.reward.functions:
        pools.append(PoolNeeds("reward", config.reward.workers, 0, DeviceBytes()))
    return Needs(device, tuple(pools))


def _bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else FLOAT32


def _itemsize(config: Config) -> int:
    return _bytes_of(config.model.dtype)


def _longest(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _bucket(config: Config, shape: ModelShape) -> int:
    return max(config.weights.bucket_bytes, shape.embedding_parameters * _itemsize(config))


def _logits(shape: ModelShape, tokens: int) -> int:
    return LOGIT_ARRAYS * FLOAT32 * min(LOGIT_CHUNK, tokens * shape.vocab)


def _tokens(config: Config, cap: int) -> int:
    """Tokens of the largest micro-batch: a sequence longer than the cap stands alone."""
    return max(cap, _longest(config))


def _largest(shape: ModelShape) -> int:
    """Parameters of the largest part of a sharded model that is gathered at a time."""
    return max(shape.layer_parameters, shape.embedding_parameters)


def _whole(shape: ModelShape, item: int, count: int) -> int:
    """Bytes of those parts of a sharded model with `count` parameters that are whole at a time."""
    return item * min(count, _largest(shape) + NEAR_ELEMENTS)


def _with_scalar_head(shape: ModelShape) -> int:
    """Parameters of a model that has one output for each token in place of logits."""
    return shape.parameters - (0 if shape.tied else shape.embedding_parameters) + shape.hidden


def _policy(config: Config, shape: ModelShape, device: Device) -> PoolNeeds:
    policy, item = config.policy, _itemsize(config)
    tokens = _share(_tokens(config, policy.max_tokens_per_microbatch), policy.sequence_parallel)
    weights, gradients, optimizer = _states(policy, item, shape.parameters)
    sharded = policy.zero_stage == 3
    second_bucket = max(_bucket(config, shape), item * _largest(shape) if sharded else 0)
    layers, beside, merged = _training_layers(config, policy, shape, tokens, device), _logits(shape, tokens), 0
    if policy.lora is None:
        beside += FLOAT32 * shape.embedding_parameters + _reduced(policy, shape.parameters)
        trained = weights
    else:
        adapted, count = _adapted_layers(shape, policy.lora), _adapter_parameters(shape, policy.lora)
        trained, gradients, optimizer = _states(policy, item, count)
        weights += trained
        layers += tokens * shape.layers * item * policy.lora.rank * len(adapted)
        beside += _reduced(policy, count)
        merged = FLOAT32 * max(inputs * outputs for inputs, outputs in adapted)
    whole = _whole(shape, item, shape.parameters) if sharded else 0
    pool = PoolNeeds(
        "policy",
        policy.ranks,
        1,
        DeviceBytes(
            weights=weights + whole,
            gradients=gradients,
            optimizer=optimizer,
            activations=layers + beside,
            heap=_heap(layers, whole, device),
            sync_buckets=_bucket(config, shape) + second_bucket + merged,
            checkpoint=_copy(config, device, trained, optimizer),
        ),
        problems=_sequence_problems("policy", policy, shape),
    )
    return _offloaded(pool, policy, shape, weights, device)


def _adapted_layers(shape: ModelShape, lora: LoraConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of the projections of a layer that have adapters; all, where a name is not known here."""
    known, targets = shape.linear_layers, lora.target_modules
    if isinstance(targets, str) or not known.keys() >= set(targets):
        return list(known.values())
    return [known[name] for name in dict.fromkeys(targets)]


def _adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    return shape.layers * lora.rank * sum(map(sum, _adapted_layers(shape, lora)))


def _critic(config: Config, shape: ModelShape, device: Device) -> PoolNeeds:
    critic, item = config.critic, _itemsize(config)
    tokens = _share(_tokens(config, critic.max_tokens_per_microbatch), critic.sequence_parallel)
    count = _with_scalar_head(shape)
    weights, gradients, optimizer = _states(critic, item, count)
    layers = _training_layers(config, critic, shape, tokens, device)
    whole = _whole(shape, item, count) if critic.zero_stage == 3 else 0
    pool = PoolNeeds(
        "critic",
        critic.ranks,
        1,
        DeviceBytes(
            weights=weights + whole,
            gradients=gradients,
            optimizer=optimizer,
            activations=layers + _reduced(critic, count),
            heap=_heap(layers, whole, device),
            checkpoint=_copy(config, device, weights, optimizer),
        ),
        problems=_sequence_problems("critic", critic, shape),
    )
    return _offloaded(pool, critic, shape, weights, device)


def _copy(config: Config, device: Device, weights: int, optimizer: int) -> int:
    """Bytes on a device of the copy that checkpoints are written from."""
    return weights + optimizer if config.checkpoint.every > 0 and device == "cpu" else 0


def _offloaded(pool: PoolNeeds, learner: LearnerConfig, shape: ModelShape, weights: int, device: Device) -> PoolNeeds:
    """A learner's pool with what it offloads in the host's memory, of `weights` its share; on CPU nothing moves."""
    if learner.offload == "none":
        return pool
    if learner.offload_to == "disk":
        state = OPTIMIZER_BYTES + FLOAT32
        sub_group = SUB_GROUP_ELEMENTS + _share(_largest(shape), learner.ranks)
        held = replace(pool.bytes, optimizer=state * min(pool.bytes.optimizer // OPTIMIZER_BYTES, sub_group))
    else:
        held = replace(pool.bytes, gradients=2 * pool.bytes.gradients)
    if device == "cpu":
        return replace(pool, bytes=held)
    moved = held.gradients + held.optimizer
    left = replace(held, gradients=0, optimizer=0)
    if learner.offload == "optimizer_and_parameters":
        moved, left = moved + weights, replace(left, weights=left.weights - weights)
    return replace(pool, bytes=left, host_bytes=moved)


def _states(learner: LearnerConfig, item: int, count: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer on one rank of a learner with `count` parameters."""
    narrow = item if learner.zero_stage == 1 and item < FLOAT32 else 0
    return (
        _share(item * count, learner.ranks if learner.zero_stage == 3 else 1),
        _share(FLOAT32 * count, learner.ranks if learner.zero_stage >= 2 else 1) + narrow * count,
        _share(OPTIMIZER_BYTES * count, learner.ranks),
    )


def _reduced(learner: LearnerConfig, count: int) -> int:
    """Bytes of the buffer that gradients of `count` parameters are reduced from; stage 3 sends a copy of it."""
    if learner.zero_stage == 3:
        return FLOAT32 * REDUCE_BUCKET_ELEMENTS * (2 if learner.ranks > 1 else 1)
    return FLOAT32 * min(count, REDUCE_BUCKET_ELEMENTS)


def _training_layers(config: Config, learner: LearnerConfig, shape: ModelShape, tokens: int, device: Device) -> int:
    item = _itemsize(config)
    per_layer = 2 * (FLOAT32 + item) * shape.hidden + item * (2 * shape.hidden + 4 * shape.intermediate)
    per_layer += _attention(config, shape, device)
    if learner.activation_checkpointing:
        return tokens * (shape.layers * item * shape.hidden + per_layer)
    return tokens * shape.layers * per_layer


def _heap(layers: int, whole: int, device: Device) -> int:
    """Bytes that the allocator keeps beside those that it was asked for, `layers` and what is `whole` at a time."""
    return int(HEAP_SHARE * layers) + whole if device == "cpu" else 0


def _attention(config: Config, shape: ModelShape, device: Device) -> int:
    """Bytes that a layer's attention keeps for each token of a row, its output among them."""
    item, query, keys = _itemsize(config), shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if device != "cpu":
        return item * (3 * query + 3 * keys)
    samples, prompt = config.rollout.samples_per_prompt, config.data.max_prompt_tokens
    # For each token of a row, those of all samples with their own prompt; a sample alone is in the row as it is.
    row = prompt + samples * config.rollout.max_new_tokens
    unpacked = samples * _longest(config) / row if samples > 1 else 0.0
    return int(item * query + FLOAT32 * (2 * query + 2 * keys * (1 + unpacked)))


def _forward_layer(shape: ModelShape, item: int, tokens: int) -> int:
    query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return tokens * item * (4 * shape.hidden + 3 * query + 3 * keys + 3 * shape.intermediate)


def _frozen_weights(shape: ModelShape, item: int, count: int, shards: int) -> int:
    """Bytes of `count` parameters on one of so many shards; 1 is a whole copy."""
    return _share(item * count, shards) + (_whole(shape, item, count) if shards > 1 else 0)


def _reference(config: Config, shape: ModelShape) -> PoolNeeds:
    reference, item = config.reference, _itemsize(config)
    tokens = _tokens(config, config.policy.max_tokens_per_microbatch)
    return PoolNeeds(
        "reference",
        reference.ranks,
        1,
        DeviceBytes(
            weights=_frozen_weights(shape, item, shape.parameters, reference.ranks if reference.sharded else 1),
            activations=_forward_layer(shape, item, tokens) + _logits(shape, tokens),
        ),
    )


def _reward_model(config: Config, shape: ModelShape) -> PoolNeeds:
    model = config.reward.model
    assert model is not None  # asked for only where there is one
    item = _bytes_of(model.dtype)
    tokens = _tokens(config, config.policy.max_tokens_per_microbatch)
    return PoolNeeds(
        "reward_model",
        model.ranks,
        1,
        DeviceBytes(
            weights=_frozen_weights(shape, item, _with_scalar_head(shape), model.ranks if model.sharded else 1),
            activations=_forward_layer(shape, item, tokens),
        ),
    )


def _rollout(config: Config, shape: ModelShape, device: Device) -> PoolNeeds:
    rollout, item = config.rollout, _itemsize(config)
    parallel = rollout.tensor_parallel
    # With more ranks than KV heads, vLLM gives each rank a copy of one.
    per_token = 2 * shape.layers * shape.head_dim * item * max(1, shape.kv_heads // parallel)
    least = per_token * _longest(config)
    sampled = (
        FLOAT32
        * shape.vocab
        * min(ENGINE_BATCH_SEQUENCES, -(-rollout.prompts_per_step * rollout.samples_per_prompt // rollout.engines))
    )
    activations = _forward_layer(shape, item, max(ENGINE_BATCH_TOKENS, _longest(config)))
    return PoolNeeds(
        "rollout",
        rollout.engines,
        parallel,
        DeviceBytes(
            weights=_share(item * shape.parameters, parallel),
            activations=_share(activations, parallel) + sampled,
            kv_cache=rollout.kv_cache_bytes if device == "cpu" else least,
            sync_buckets=2 * _bucket(config, shape),
        ),
        problems=tuple(_rollout_problems(config, shape, device, per_token)),
    )


def _rollout_problems(config: Config, shape: ModelShape, device: Device, kv_bytes_per_token: int) -> list[str]:
    rollout, parallel = config.rollout, config.rollout.tensor_parallel
    problems = []
    if not _heads_divide(shape, parallel):
        allowed = [n for n in range(1, shape.heads + 1) if _heads_divide(shape, n)]
        problems.append(
            f"rollout.tensor_parallel = {parallel}: the model has {shape.heads} heads and {shape.kv_heads} KV heads, "
            f"which {parallel} devices can't share evenly. Use one of {', '.join(map(str, allowed))}"
        )
    longest = _longest(config)
    if device == "cpu" and rollout.kv_cache_bytes < kv_bytes_per_token * longest:
        problems.append(
            f"rollout.kv_cache_bytes = {rollout.kv_cache_bytes}: one sequence of {longest} tokens needs "
            f"{kv_bytes_per_token} x {longest} = {kv_bytes_per_token * longest} bytes. Raise it to at least that, or "
            "lower data.max_prompt_tokens or rollout.max_new_tokens"
        )
    return problems


def _heads_divide(shape: ModelShape, parallel: int) -> bool:
    # vLLM splits KV heads over ranks or, with more ranks than KV heads, copies each to equally many ranks.
    kv_heads_divide = shape.kv_heads % parallel == 0 or parallel % shape.kv_heads == 0
    return shape.heads % parallel == 0 and kv_heads_divide


def _sequence_problems(name: str, learner: LearnerConfig, shape: ModelShape) -> tuple[str, ...]:
    """Why this learner's ranks can't share rows: each takes equally many heads and KV heads."""
    sharing, heads, kv_heads = learner.sequence_parallel, shape.heads, shape.kv_heads
    common = gcd(heads, kv_heads)
    if common % sharing == 0:
        return ()
    allowed = [size for size in range(1, common + 1) if common % size == 0]
    return (
        f"{name}.sequence_parallel = {sharing}: the model has {heads} heads and {kv_heads} KV heads, and {sharing} "
        f"ranks would get {heads / sharing:.4g} and {kv_heads / sharing:.4g} of them. Use one of "
        f"{', '.join(map(str, allowed))}",
    )


def _share(count: int, parts: int) -> int:
    return -(-count // parts)
