"""Buckets, checksums and receipts: the parts of a weight sync that need no process."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.cluster import wait
from rlhf.weights.buckets import plan_buckets
from rlhf.weights.checksum import checksum
from rlhf.weights.client import EngineClient
from rlhf.weights.loading import ReceiptMixin
from rlhf.weights.receipts import Receipt, SyncError, compare
from rlhf.weights.transports import ENGINE_BACKENDS, register_transports, trainer_init_info

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
tensor_lists = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 9), min_size=0, max_size=3)), min_size=1, max_size=30
)


def named(tensors):
    return [(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(tensors)]


@given(tensor_lists, st.integers(16, 4096))
def test_every_tensor_is_in_exactly_one_bucket_in_order(tensors, cap):
    declared = named(tensors)
    slots = [slot for bucket in plan_buckets(declared, cap) for slot in bucket.slots]
    assert [(s.name, s.dtype, s.shape) for s in slots] == declared


@given(tensor_lists, st.integers(16, 4096))
def test_a_bucket_exceeds_the_cap_only_as_a_single_larger_tensor(tensors, cap):
    for bucket in plan_buckets(named(tensors), cap):
        assert bucket.nbytes <= cap or len(bucket.slots) == 1


@given(tensor_lists, st.integers(16, 4096))
def test_what_is_packed_into_buckets_comes_out_unchanged(tensors, cap):
    declared = named(tensors)
    values = {name: torch.arange(math.prod(shape) or 1).to(dtype).view(shape) for name, dtype, shape in declared}
    for bucket in plan_buckets(declared, cap):
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(buffer).copy_(values[slot.name])
        for slot in bucket.slots:
            assert torch.equal(slot.view(buffer), values[slot.name])


@pytest.mark.parametrize("elements", [1, 3, 7, 1 << 14, (1 << 14) * 65 + 5])
def test_flipping_any_bit_changes_the_checksum(elements):
    tensor = torch.arange(elements, dtype=torch.int16)
    before = checksum(tensor)
    for place in {0, elements // 2, elements - 1}:
        for bit in (0, 7, 14):
            flipped = tensor.clone()
            flipped[place] ^= 1 << bit
            assert checksum(flipped) != before


@pytest.mark.parametrize("distance", [1, 4, 1 << 14, 1 << 16, 1 << 20])
def test_swapping_two_elements_changes_the_checksum(distance):
    tensor = torch.arange((1 << 20) + 9, dtype=torch.int32)
    swapped = tensor.clone()
    swapped[0], swapped[distance] = tensor[distance].clone(), tensor[0].clone()
    assert checksum(swapped) != checksum(tensor)


def test_checksum_depends_on_bytes_and_not_on_where_they_lie():
    tensor = torch.randn(1001, dtype=torch.float32).to(torch.bfloat16)
    padded = torch.cat([torch.zeros(3, dtype=torch.bfloat16), tensor])
    assert checksum(padded[3:]) == checksum(tensor)
    assert checksum(tensor.view(7, 143)) == checksum(tensor)
    assert checksum(tensor.view(7, 143).t()) != checksum(tensor)


def test_all_zeros_of_different_lengths_differ():
    # A receiver whose buffer was never written must not look like a shorter one.
    assert len({checksum(torch.zeros(n)) for n in (1, 2, 3, 1000, 1 << 15)}) == 5


def test_compare_names_what_is_missing_surplus_and_different():
    sent = Receipt(checksums={"a": 1, "b": 2, "c": 3})
    received = Receipt(checksums={"a": 1, "b": 9, "d": 4})
    with pytest.raises(SyncError, match=r"engine 1 rank 0 .*not received \(c\).*never sent \(d\).*other bytes \(b\)"):
        compare(sent, received, who="engine 1 rank 0")
    compare(sent, Receipt(checksums=dict(sent.checksums)), who="engine 0 rank 0")


class RecordedEngine:
    """Stands in for an engine actor: remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args: self.calls.append((method, args)))


def test_every_engine_gets_a_rank_offset_of_its_own_after_the_sender(monkeypatch):
    monkeypatch.setattr(wait, "get", lambda references, **_: None)
    engines = [RecordedEngine() for _ in range(3)]
    client = EngineClient(engines, workers=[2, 1, 2], deadline_s=1)
    client.init_weight_transfer_engine({"master_address": "a", "rank_offset": 1})
    # Rank 0 is the sender; the engines have 2, 1 and 2 workers: ranks 1-2, 3, 4-5.
    assert [engine.calls[0][1][0]["rank_offset"] for engine in engines] == [1, 3, 4]


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_init_and_update_messages_are_those_of_the_installed_vllm(transport):
    """What our client passes on is parsed by vLLM's own engine classes; a release that changes them fails here."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

    register_transports()
    info = trainer_init_info(
        transport, rank=0, address="127.0.0.1", port=1, world_size=3, bucket_bytes=1 << 20, timeout_s=5
    )
    assert WeightTransferTrainerFactory._registry[info.backend]().init_info_cls is type(info)
    engine = WeightTransferEngineFactory._registry[ENGINE_BACKENDS[transport]]()
    if transport == "nccl":
        wire = worker_init_payload(
            NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=3)
        )
    else:
        wire = {key: value for key, value in asdict(info).items() if key != "rank"}
    parsed = engine.init_info_cls(**{**wire, "rank_offset": 2})
    assert (parsed.rank_offset, parsed.world_size, parsed.master_port) == (2, 3, 1)
    update = engine.update_info_cls(names=["a"], dtype_names=["bfloat16"], shapes=[[2, 3]])
    assert update.names == ["a"]
    # Start and finish are ours on every transport: they hold the receipts.
    assert engine.start_weight_update is ReceiptMixin.start_weight_update
