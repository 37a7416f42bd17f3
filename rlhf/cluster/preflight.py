"""The preflight: compares what a run needs with what the cluster has, before anything is started.

A pending placement group never fails by itself, so what can't be placed is refused here, in seconds and with numbers.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

import psutil

from rlhf.cluster.needs import Device, Needs, PoolNeeds
from rlhf.cluster.needs_table import size

_NVIDIA_SMI_DEADLINE_S = 20


class Refused(RuntimeError):
    """The run was refused before anything started (exit code 2)."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: slots or GPUs, and bytes of host memory."""

    cpus: int
    gpus: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster has. `gpu_bytes` is the memory of the smallest GPU, where it is known.

    `elastic` is true for a cluster that we start ourselves: on CPU it gets as many slots as the run needs.
    """

    nodes: tuple[Node, ...]
    gpu_bytes: int | None = None
    elastic: bool = False

    @property
    def cpus(self) -> int:
        """CPU slots of all nodes."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def host_bytes(self) -> int:
        """Host memory of all nodes, bytes."""
        return sum(node.host_bytes for node in self.nodes)

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPUs" + (f" of {size(self.gpu_bytes)}" if self.gpu_bytes else "")
        slots = f"{self.cpus} CPUs (as many slots as needed)" if self.elastic else f"{self.cpus} CPU slots"
        nodes = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        return ", ".join([slots, *([gpus] if self.gpus else []), f"{size(self.host_bytes)} of host memory"]) + nodes


def local_resources() -> Resources:
    """What this machine has, for a cluster that we would start here."""
    gpus = _gpu_memory()
    node = Node(psutil.cpu_count() or 1, len(gpus), psutil.virtual_memory().total)
    return Resources((node,), min(gpus) if gpus else None, elastic=True)


def _gpu_memory() -> list[int]:
    """Bytes of each visible NVIDIA GPU; none when the driver's tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None or _torch_is_for_cpu():
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [int(line) << 20 for line in answer.stdout.split() if line.isdigit()]
    # Ray offers no more than this variable names.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else gpus[: len([name for name in visible.split(",") if name.strip()])]


def _torch_is_for_cpu() -> bool:
    """Whether the installed torch can't use a GPU; read from its metadata, torch is not imported."""
    try:
        return "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def resolve_device(setting: Literal["auto", "cpu", "cuda"], resources: Resources) -> Device:
    """The device of a run: what is set, or GPUs where the cluster has any. Raises `Refused` for GPUs that aren't."""
    if setting == "cuda" and not resources.gpus:
        raise Refused(
            f"placement.device = cuda: the cluster has no GPU ({resources}). "
            "Set placement.device to auto or cpu, or use a machine whose `nvidia-smi` lists one"
        )
    if setting == "auto":
        return "cuda" if resources.gpus else "cpu"
    return setting


def preflight(needs: Needs, resources: Resources, gpu_memory_utilization: float = 1.0) -> None:
    """Raise `Refused` with everything that is wrong: impossible shapes, too few devices, too little memory.

    `gpu_memory_utilization` is the share of a GPU that a rollout engine may use.
    """
    reasons = list(needs.problems) + _device_reasons(needs, resources)
    reasons += _memory_reasons(needs, resources, gpu_memory_utilization)
    if reasons:
        raise Refused("the run can't be placed:\n" + "\n".join(f"  - {reason}" for reason in reasons))


def _device_reasons(needs: Needs, resources: Resources) -> list[str]:
    if needs.device == "cpu" and resources.elastic:
        return []
    on_cpu = needs.device == "cpu"
    noun, have = ("CPU slots", resources.cpus) if on_cpu else ("GPUs", resources.gpus)
    reasons = []
    if needs.devices > have:
        reasons.append(
            f"needs {needs.devices} {noun}, cluster has {have}:\n{_by_pool(needs, noun)}\n    "
            f"Lower {_knobs(needs)}, or give the cluster {needs.devices - have} more"
            + (" (ray start --num-cpus=N)" if on_cpu else "")
        )
    largest = max((node.cpus if on_cpu else node.gpus for node in resources.nodes), default=0)
    reasons += [
        f"{pool.pool}: one unit needs {pool.devices_per_unit} {noun} on one node, the largest node has {largest}. "
        f"Lower rollout.tensor_parallel to at most {largest}"
        for pool in needs.pools
        if largest < pool.devices_per_unit and pool.devices_per_unit > 1
    ]
    return reasons


def _by_pool(needs: Needs, noun: str) -> str:
    return "\n".join(
        f"      {pool.pool} needs {pool.units} x {pool.devices_per_unit} = {pool.devices} {noun}"
        for pool in needs.pools
        if pool.devices
    )


def _knobs(needs: Needs) -> str:
    keys = {
        "policy": "policy.ranks",
        "critic": "critic.ranks",
        "reference": "reference.ranks",
        "reward_model": "reward.model.ranks",
        "rollout": "rollout.engines",
    }
    names = [keys[pool.pool] for pool in needs.pools if pool.units > 1 and pool.pool in keys]
    if any(pool.devices_per_unit > 1 for pool in needs.pools):
        names.append("rollout.tensor_parallel")
    return ", ".join(names) if names else "the number of pools (algorithm.kl.where: none needs no reference)"


def _memory_reasons(needs: Needs, resources: Resources, utilization: float) -> list[str]:
    if needs.device == "cuda":
        gpu = (
            _gpu_reason(pool, resources.gpu_bytes, utilization if pool.pool == "rollout" else 1.0)
            for pool in needs.pools
        )
        return [reason for reason in (*gpu, _host_reason(needs, resources)) if reason is not None]
    if needs.total_bytes <= resources.host_bytes:
        return []
    terms = "\n".join(
        f"      {pool.pool} needs {pool.devices} x {size(pool.bytes.total)} = {size(pool.total_bytes)} ({_parts(pool)})"
        for pool in needs.pools
        if pool.devices
    )
    return [
        f"needs {size(needs.total_bytes)} of host memory, cluster has {size(resources.host_bytes)}:\n{terms}\n    "
        "Lower policy.max_tokens_per_microbatch, rollout.kv_cache_bytes or the number of ranks and engines, set "
        "policy.activation_checkpointing, raise policy.zero_stage with more than one rank, or use a smaller model"
    ]


def _host_reason(needs: Needs, resources: Resources) -> str | None:
    """What pools that run on GPUs keep in host memory, if it is too much."""
    if needs.host_bytes <= resources.host_bytes:
        return None
    terms = " + ".join(f"{pool.pool} {pool.units} x {size(pool.host_bytes)}" for pool in needs.pools if pool.host_bytes)
    return (
        f"needs {size(needs.host_bytes)} of host memory for what is offloaded ({terms}), cluster has "
        f"{size(resources.host_bytes)}. Set policy.offload or critic.offload to less"
    )


def _gpu_reason(pool: PoolNeeds, gpu_bytes: int | None, share: float) -> str | None:
    if gpu_bytes is None or pool.devices == 0 or pool.bytes.total <= gpu_bytes * share:
        return None
    remedy = {
        "policy": "Raise policy.ranks with policy.zero_stage 3, set policy.activation_checkpointing or policy.offload, "
        "or lower policy.max_tokens_per_microbatch",
        "critic": "Raise critic.ranks with critic.zero_stage 3, set critic.activation_checkpointing or critic.offload, "
        "or lower critic.max_tokens_per_microbatch",
        "reference": "Set reference.sharded with more reference.ranks, or lower policy.max_tokens_per_microbatch",
        "reward_model": "Set reward.model.sharded with more reward.model.ranks, or use a smaller reward model",
        "rollout": "Raise rollout.tensor_parallel or rollout.gpu_memory_utilization",
    }.get(pool.pool, "Lower policy.max_tokens_per_microbatch, or use a smaller model")
    limit = size(int(gpu_bytes * share)) + (f" ({share:g} of {size(gpu_bytes)})" if share < 1 else "")
    return f"{pool.pool} needs {size(pool.bytes.total)} on each GPU ({_parts(pool)}), a GPU has {limit}. {remedy}"


def _parts(pool: PoolNeeds) -> str:
    parts = pool.bytes
    named = {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": parts.activations,
        "KV cache": parts.kv_cache,
        "sync buckets": parts.sync_buckets,
    }
    return " + ".join(f"{name} {size(value)}" for name, value in named.items() if value)
