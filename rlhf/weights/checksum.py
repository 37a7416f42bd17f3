"""A checksum of a tensor's bytes, fast enough to take over every tensor of every sync, on CPU and GPU alike."""

from __future__ import annotations

import functools

import torch

# Lanes per row: 256 KiB, which stay in a core's cache with what is accumulated; torch splits no operation this small
# over threads, so that who takes a checksum beside other work waits for no other thread.
_ROW = 1 << 15
_SEED = 20260101
# Odd, so that multiplying by it loses nothing modulo 2^64. As a signed number: torch's lanes are int64.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


@functools.lru_cache(maxsize=4)
def _weights(device: str) -> torch.Tensor:
    # Odd multipliers are invertible modulo 2^64: no change of a single lane can cancel.
    generator = torch.Generator().manual_seed(_SEED)
    return (torch.randint(0, 1 << 61, (_ROW,), generator=generator) * 2 + 1).to(device)


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of the tensor's bytes, whatever its dtype and shape.

    8-byte lanes in rows: `sum_j w_j sum_i f^(n-i) lane_ij` modulo 2^64 with odd w and f, rows by Horner's rule in one
    pass over memory. Each lane's weight depends on its place, so swapped, shifted or flipped bytes change the sum; it
    guards against faults, not against an adversary.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    whole = raw.numel() // 8 * 8
    if whole < raw.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total = int(tail.view(torch.int64).item()) * 3
    if raw.storage_offset() % 8:
        # Reinterpreting as 8-byte lanes needs an aligned start.
        raw = raw.clone()
    lanes = raw[:whole].view(torch.int64)
    sums = torch.zeros(min(_ROW, lanes.numel()), dtype=torch.int64, device=lanes.device)
    for row in torch.split(lanes, _ROW):
        part = sums[: row.numel()]
        torch.add(row, part, alpha=_FACTOR, out=part)
    total += int((sums * _weights(str(lanes.device))[: sums.numel()]).sum().item())
    return (total + raw.numel()) % (1 << 64)
