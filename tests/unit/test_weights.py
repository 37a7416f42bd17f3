"""Buckets, checksums and receipts: the parts of a weight sync that need no process."""

import math
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from rlhf.weights.buckets import plan_buckets
from rlhf.weights.checksum import checksum
from rlhf.weights.client import CallsFailed, EngineClient
from rlhf.weights.endpoint import Declared, Endpoint
from rlhf.weights.gloo import GlooInitInfo, GlooUpdateInfo
from rlhf.weights.loading import ReceiptMixin
from rlhf.weights.receipts import Receipt, SyncError, compare
from rlhf.weights.transports import ENGINE_BACKENDS, register_transports

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


class Answer:
    """Stands in for a Ray reference whose call is done."""

    def future(self):
        done = Future()
        done.set_result(None)
        return done


class RecordedEngine:
    """Stands in for an engine actor: remembers what it was called with."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        def remote(*args):
            self.calls.append((method, args))
            return Answer()

        return SimpleNamespace(remote=remote)


def test_every_engine_gets_a_rank_offset_of_its_own_after_the_sender():
    engines = [RecordedEngine() for _ in range(3)]
    client = EngineClient(engines, workers=[2, 1, 2], deadline_s=1)
    client.init_weight_transfer_engine({"master_address": "a", "rank_offset": 1})
    # Rank 0 is the sender; the engines have 2, 1 and 2 workers: ranks 1-2, 3, 4-5.
    assert [engine.calls[0][1][0]["rank_offset"] for engine in engines] == [1, 3, 4]


def test_a_call_that_fails_or_never_ends_is_reported_with_the_engines_place():
    def reference(outcome):
        future = Future()
        if outcome is not None:
            future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)
        return SimpleNamespace(future=lambda: future)

    engines = [
        SimpleNamespace(start_weight_update=SimpleNamespace(remote=lambda o=o: reference(o)))
        for o in (True, ValueError("broken"), None)
    ]
    with pytest.raises(CallsFailed) as caught:
        EngineClient(engines, workers=[1, 1, 1], deadline_s=0.01).start_weight_update()
    assert caught.value.failures == {
        1: "start_weight_update: broken",
        2: "start_weight_update: not done after 0.01 s",
    }


ENDPOINT = Endpoint(0, "nccl", "127.0.0.1", 1, engines=[None, None], workers=[1, 1], bucket_bytes=1 << 20, deadline_s=5)
DECLARED = (Declared("a", "bfloat16", (2, 3)),)


def test_init_and_update_messages_of_nccl_are_those_of_the_installed_vllm():
    """What our client passes on is parsed by vLLM's own engine classes; a release that changes them fails here."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from rlhf.weights.nccl import trainer_init_info

    register_transports()
    info = trainer_init_info(ENDPOINT)
    trainer = WeightTransferTrainerFactory._registry[info.backend]()
    assert trainer is NCCLTrainerWeightTransferEngine
    assert trainer.init_info_cls is type(info)
    # One sender and two engines of one worker each.
    assert (info.world_size, info.packed_buffer_size_bytes, info.is_sender) == (3, 1 << 20, True)
    engine = WeightTransferEngineFactory._registry[ENGINE_BACKENDS["nccl"]]()
    wire = worker_init_payload(
        NCCLWeightTransferInitInfo(
            master_address=info.master_address,
            master_port=info.master_port,
            rank_offset=1,
            world_size=info.world_size,
            packed=info.packed,
            packed_buffer_size_bytes=info.packed_buffer_size_bytes,
            packed_num_buffers=info.packed_num_buffers,
        )
    )
    parsed = engine.init_info_cls(**{**wire, "rank_offset": 2})
    assert (parsed.rank_offset, parsed.world_size, parsed.packed_buffer_size_bytes) == (2, 3, 1 << 20)
    update = engine.update_info_cls(names=["a"], dtype_names=["bfloat16"], shapes=[[2, 3]])
    assert update.names == ["a"]
    # Start and finish are ours: they hold the receipts.
    assert engine.start_weight_update is ReceiptMixin.start_weight_update
    assert engine.finish_weight_update is ReceiptMixin.finish_weight_update


def test_vllms_nccl_trainer_drives_our_client_through_the_four_methods(monkeypatch):
    """The whole conversation of two groups, but for the broadcast itself."""
    from vllm.distributed.weight_transfer import nccl_engine

    from rlhf.weights.nccl import NcclSender

    class Source(WeightSource):
        def metadata(self):
            return [ParamMeta("a", torch.bfloat16, (2, 3))]

        def __iter__(self):
            yield "a", torch.ones(2, 3, dtype=torch.bfloat16)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: SimpleNamespace(destroy=lambda: None))
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: list(iterator))
    engines = [RecordedEngine(), RecordedEngine(), RecordedEngine()]
    sender = NcclSender(Source())
    assert sender.join(replace(ENDPOINT, engines=engines[:2])) == ()
    assert sender.join(replace(ENDPOINT, epoch=1, engines=engines[2:], workers=[2])) == ()
    receipt, _, failures = sender.send([0, 1])
    assert failures == ()
    # Six bfloat16 values.
    assert receipt.bytes == 12
    methods = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert [[method for method, _ in engine.calls] for engine in engines] == [methods] * 3
    assert [engine.calls[0][1][0]["rank_offset"] for engine in engines] == [1, 2, 1]
    assert engines[2].calls[2][1][0] == {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


def test_messages_of_gloo_are_parsed_by_the_engine_side_that_vllm_is_given():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register_transports()
    engine = WeightTransferEngineFactory._registry[ENGINE_BACKENDS["gloo"]]()
    info = engine.init_info_cls(
        **{**vars(GlooInitInfo("127.0.0.1", 1, world_size=3, bucket_bytes=16, timeout_s=5)), "rank_offset": 2}
    )
    assert (info.rank_offset, info.world_size, info.master_port) == (2, 3, 1)
    update = engine.update_info_cls(**GlooUpdateInfo.of(DECLARED).wire())
    ((slot,),) = [bucket.slots for bucket in update.buckets(16)]
    # Six bfloat16 values.
    assert (slot.name, slot.dtype, slot.shape, slot.nbytes) == ("a", torch.bfloat16, (2, 3), 12)
    assert engine.start_weight_update is ReceiptMixin.start_weight_update
