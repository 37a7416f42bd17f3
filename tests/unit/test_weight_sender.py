"""The gloo transport without an engine: what the sender overlaps and holds, and what both sides do when one fails."""

import socket
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rlhf.weights import gloo_sender
from rlhf.weights.checksum import checksum
from rlhf.weights.client import EngineClient
from rlhf.weights.endpoint import Declared, Endpoint
from rlhf.weights.gloo import GlooInitInfo, GlooUpdateInfo, GlooWeightTransferEngine
from rlhf.weights.gloo_sender import GlooSender, Member
from rlhf.weights.receipts import WIRE_LOST, SyncError
from rlhf.weights.sender import WeightSender
from rlhf.weights.slabs import Slabs
from rlhf.weights.source import LearnerSource

KB = 1024
# Four tensors of 1 KB of float32 values and one of 3 KB: with buckets of 2 KB these are two buckets and a larger one.
SIZES = {"a": 256, "b": 256, "c": 256, "d": 256, "large": 768}


class Holder:
    """Parameters that are whole only within `gather`, as at ZeRO 3; remembers how many bytes were whole at a time."""

    def __init__(self, sharded=False, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.named = [
            (name, torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))) for name, size in SIZES.items()
        ]
        self.sharded = sharded
        self.whole = 0
        self.asked = 0
        self.events = []
        if sharded:
            for _, parameter in self.named:
                parameter.ds_shape = parameter.shape

    def named_parameters_for_sync(self):
        return self.named

    @contextmanager
    def gather(self, parameters):
        self.events.append(("gather", len(parameters)))
        self.whole = sum(p.numel() * p.element_size() for p in parameters) if self.sharded else 0
        yield
        self.whole = 0

    def weight(self, parameter):
        self.asked += 1
        return parameter.detach()


class Wire:
    """A wire whose buckets arrive when the sender asks for the third time, or never."""

    def __init__(self, events, stuck=False):
        self.events, self.stuck, self.gave_up = events, stuck, False

    def broadcast(self, tensor):
        asked = 0
        self.events.append(("wire", tensor.numel()))

        def is_completed():
            nonlocal asked
            asked += 1
            return asked > 2 and not self.stuck

        def wait():
            if self.stuck:
                raise RuntimeError("timed out")
            self.events.append(("landed", tensor.numel()))

        return SimpleNamespace(is_completed=is_completed, wait=wait)

    def give_up(self):
        self.gave_up = True


def declared(holder, dtype="float32"):
    return tuple(Declared(name, dtype, tuple(p.shape)) for name, p in holder.named)


def engine_that(outcomes=None):
    """An engine actor whose calls succeed, but for those in `outcomes` (an exception)."""

    class Handle:
        def __getattr__(self, method):
            future = Future()
            outcome = (outcomes or {}).get(method)
            future.set_exception(outcome) if outcome else future.set_result(None)
            return SimpleNamespace(remote=lambda *args: SimpleNamespace(future=lambda: future))

    return Handle()


def sender_with(*wires, bucket_bytes=2 * KB, deadline_s=5.0, outcomes=None):
    sender = GlooSender()
    for epoch, wire in enumerate(wires):
        client = EngineClient([engine_that(outcomes)], [1], deadline_s)
        sender._members[epoch] = Member(epoch, client, wire, bucket_bytes, deadline_s)
    return sender


def send(sender, holder, epochs, bucket_bytes=2 * KB):
    return sender.send(epochs, LearnerSource(holder, torch.float32, bucket_bytes), declared(holder))


def test_the_next_bucket_is_packed_while_the_last_one_travels():
    holder = Holder()
    send(sender_with(Wire(holder.events)), holder, [0])
    wires = [(kind, size) for kind, size in holder.events if kind != "gather"]
    # Two buckets of two tensors of 1 KB, then the large one: the second is sent before the first has landed.
    assert wires == [
        ("wire", 2 * KB),
        ("wire", 2 * KB),
        ("landed", 2 * KB),
        ("wire", 3 * KB),
        ("landed", 2 * KB),
        ("landed", 3 * KB),
    ]


def test_at_zero_3_the_next_piece_is_gathered_while_the_last_bucket_travels():
    holder = Holder(sharded=True)
    send(sender_with(Wire(holder.events)), holder, [0])
    assert holder.events == [
        ("gather", 2),
        ("wire", 2 * KB),
        ("gather", 2),
        ("landed", 2 * KB),
        ("wire", 2 * KB),
        ("gather", 1),
        ("landed", 2 * KB),
        ("wire", 3 * KB),
        ("landed", 3 * KB),
    ]


def test_each_bucket_is_packed_once_and_sent_to_all_groups():
    holder = Holder()
    first, second = Wire([]), Wire([])
    receipt, seconds, failures = send(sender_with(first, second), holder, [0, 1])
    assert failures == ()
    assert [size for kind, size in first.events if kind == "wire"] == [2 * KB, 2 * KB, 3 * KB]
    assert first.events == second.events
    # Packed once: the receipt has every tensor once. 4 KB of the small ones and 3 KB of the large one.
    assert (list(receipt.checksums), receipt.bytes) == (list(SIZES), 7 * KB)
    assert seconds.keys() == {"gather", "cast", "checksum", "wire"}


@pytest.mark.parametrize(
    ("sharded", "peak_bytes"),
    # Two buffers of 2 KB, the large tensor being sent from where it is; at ZeRO 3 the large one whole, and its buffer.
    [(False, 2 * 2 * KB), (True, 2 * 3 * KB)],
)
def test_no_more_than_two_buckets_of_memory_are_taken(monkeypatch, sharded, peak_bytes):
    holder = Holder(sharded=sharded)
    held = weakref.WeakSet()
    peak = 0
    empty = torch.empty

    class Watched(Wire):
        def broadcast(self, tensor):
            look()
            return super().broadcast(tensor)

    def look():
        nonlocal peak
        peak = max(peak, holder.whole + sum(buffer.numel() for buffer in held))

    def watched(*args, **kwargs):
        buffer = empty(*args, **kwargs)
        if kwargs.get("dtype") is torch.uint8:
            held.add(buffer)
            look()
        return buffer

    monkeypatch.setattr(gloo_sender.torch, "empty", watched)
    sender = sender_with(Watched(holder.events))
    for _ in range(2):
        send(sender, holder, [0])
    assert peak == peak_bytes


def test_a_piece_that_is_gathered_is_at_most_a_bucket_or_a_single_tensor():
    holder = Holder(sharded=True)
    sizes = []
    for _ in LearnerSource(holder, torch.float32, 2 * KB).parameters():
        sizes.append(holder.whole)
    assert sizes == [2 * KB] * 4 + [3 * KB]


def test_a_bucket_of_one_tensor_is_sent_from_where_it_is():
    holder = Holder()
    sent = []

    class Kept(Wire):
        def broadcast(self, tensor):
            sent.append(tensor.data_ptr())
            return super().broadcast(tensor)

    send(sender_with(Kept(holder.events)), holder, [0])
    assert sent[-1] == dict(holder.named)["large"].data_ptr()
    # At another dtype it has to be cast.
    source = LearnerSource(holder, torch.bfloat16, 2 * KB)
    sender_with(Kept(holder.events)).send([0], source, declared(holder, "bfloat16"))
    assert sent[-1] != dict(holder.named)["large"].data_ptr()


class Merging(Holder):
    """Every weight is a new tensor; counts those that are still there when the next one is made."""

    def __init__(self):
        super().__init__()
        self.made = weakref.WeakSet()
        self.left = []

    def weight(self, parameter):
        self.left.append(len(self.made))
        merged = parameter.detach() + 1
        self.made.add(merged)
        return merged


def test_merged_tensors_are_made_one_at_a_time():
    holder = Merging()
    source = LearnerSource(holder, torch.bfloat16, 2 * KB)
    sender_with(Wire([])).send([0], source, declared(holder, "bfloat16"))
    assert holder.left == [0] * len(SIZES)


def test_a_merged_tensor_that_is_sent_from_where_it_is_is_held_until_it_has_landed():
    holder = Merging()
    held = []

    class Weak(Wire):
        def broadcast(self, tensor):
            # The wire itself holds another one.
            travelling, work = weakref.ref(tensor), super().broadcast(torch.empty_like(tensor))
            land = work.wait
            work.wait = lambda: held.append(travelling() is not None) or land()
            return work

    receipt, _, failures = send(sender_with(Weak(holder.events)), holder, [0])
    assert (held, failures) == ([True] * 3, ())
    large = dict(holder.named)["large"].detach() + 1
    assert receipt.checksums["large"] == checksum(large)


def test_a_slab_is_taken_again_only_when_nothing_views_it():
    slabs = Slabs()
    first = slabs.take(1 << 20)
    place, view = first.data_ptr(), first[16:32]
    del first
    # A view is enough, however small: what the layerwise loader holds.
    assert slabs.take(1 << 20).data_ptr() != place
    del view
    assert place in {slabs.take(1 << 19).data_ptr(), slabs.take(1 << 20).data_ptr()}


def test_a_bucket_that_is_not_delivered_ends_at_the_deadline_and_names_its_group():
    holder = Holder()
    fine, stuck = Wire(holder.events), Wire([], stuck=True)
    sender = sender_with(fine, stuck, deadline_s=0.05)
    _, _, failures = send(sender, holder, [0, 1])
    assert [(f.epoch, f.place, f.reason) for f in failures] == [(1, None, "a bucket was not delivered within 0.05 s")]
    # All engines of the transfer are released, and the groups are gone.
    assert fine.gave_up and stuck.gave_up
    assert sender._members == {}


def test_an_engine_whose_call_fails_ends_the_transfer_before_the_deadline():
    holder = Holder()
    sender = sender_with(Wire([], stuck=True), deadline_s=100, outcomes={"update_weights": ValueError("broken")})
    _, _, failures = send(sender, holder, [0])
    assert [(f.epoch, f.place, f.reason) for f in failures] == [(0, 0, "update_weights: broken")]


def test_the_source_is_run_through_once_whatever_the_engines_do():
    holder = Holder(sharded=True)
    send(sender_with(Wire([]), outcomes={"start_weight_update": ValueError("broken")}), holder, [0])
    # As often as a rank that only gathers.
    assert [event for event in holder.events if event[0] == "gather"] == [("gather", 2), ("gather", 2), ("gather", 1)]
    other = Holder(sharded=True)
    follower = WeightSender(other, torch.float32, "gloo", 2 * KB, rank=1)
    follower.join(Endpoint(0, "gloo", "", 0, [], [], 2 * KB, 5.0))
    assert follower.send([0], version=3).version == 3
    assert other.events == [("gather", 2), ("gather", 2), ("gather", 1)]
    # What adapters are merged into is of use on rank 0 only.
    assert (holder.asked, other.asked) == (5, 0)


def test_a_send_to_a_group_that_was_left_is_an_error():
    sender = WeightSender(Holder(), torch.float32, "gloo", 2 * KB, rank=1)
    sender.join(Endpoint(4, "gloo", "", 0, [], [], 2 * KB, 5.0))
    sender.leave(4)
    with pytest.raises(SyncError, match=r"not in the transfer groups \[4\]"):
        sender.send([4], version=0)


# Real wires on loopback, the engine's model stood in for.


class Receiver:
    """An engine actor with one worker, of which everything but the model is real; calls run in threads."""

    def __init__(self, load=lambda weights: None):
        self.worker = object.__new__(GlooWeightTransferEngine)
        self.worker.parallel_config = SimpleNamespace(rank=0)
        self.worker.checked = {}
        self.worker.model = SimpleNamespace(load_weights=load)
        self.error = None

    def __getattr__(self, method):
        def call(*args):
            future = Future()

            def run():
                try:
                    if method == "init_weight_transfer_engine":
                        self.worker.init_transfer_engine(GlooInitInfo(**args[0]))
                    elif method == "update_weights":
                        self.worker.receive_weights(GlooUpdateInfo(**args[0]))
                    future.set_result(None)
                except Exception as error:
                    self.error = error
                    future.set_exception(error)

            threading.Thread(target=run, daemon=True).start()
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=call)


def wait_until(ready):
    """Give threads ten seconds; the caller asserts what they left."""
    deadline = time.monotonic() + 10
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.02)


def joined(sender, epoch, engines, deadline_s=5.0):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    endpoint = Endpoint(epoch, "gloo", "127.0.0.1", port, engines, [1] * len(engines), 2 * KB, deadline_s)
    return sender.join(endpoint)


def test_two_groups_on_real_wires_receive_what_was_sent():
    arrived = [{}, {}, {}]
    engines = [Receiver(lambda weights, a=a: a.update((n, t.clone()) for n, t in weights)) for a in arrived]
    sender, holder = GlooSender(), Holder()
    assert joined(sender, 0, engines[:2]) == ()
    assert joined(sender, 1, engines[2:]) == ()
    for _ in range(2):
        assert send(sender, holder, [0, 1])[2] == ()
    for tensors in arrived:
        assert list(tensors) == list(SIZES)
        assert all(torch.equal(tensors[name], parameter) for name, parameter in holder.named)


def test_an_engine_that_cannot_load_a_tensor_keeps_its_group_in_step():
    def refuse(weights):
        if weights[0][0] == "c":
            raise ValueError("c has the wrong shape")

    good, bad = {}, Receiver(refuse)
    engines = [Receiver(lambda weights: good.update((n, t.clone()) for n, t in weights)), bad]
    sender = GlooSender()
    joined(sender, 0, engines)
    _, _, failures = send(sender, Holder(), [0])
    assert [(f.epoch, f.place) for f in failures] == [(0, 1)]
    assert "c has the wrong shape" in failures[0].reason
    # The other one got everything; the sender doesn't wait for its last bucket once another has failed.
    wait_until(lambda: len(good) == len(SIZES))
    assert list(good) == list(SIZES)


def test_a_sender_that_fails_releases_its_engines_long_before_the_deadline():
    class Broken(Holder):
        @contextmanager
        def gather(self, parameters):
            if len(parameters) == 1:
                raise RuntimeError("a rank is gone")
            yield

    engine = Receiver()
    sender = GlooSender()
    # Without the word of the sender the engine would wait for these 60 s.
    joined(sender, 0, [engine], deadline_s=60.0)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        send(sender, Broken(), [0])
    wait_until(lambda: engine.error is not None)
    assert WIRE_LOST in str(engine.error)


def test_an_engine_that_does_not_come_is_reported_and_the_others_are_released():
    present = Receiver()
    absent = SimpleNamespace(
        init_weight_transfer_engine=SimpleNamespace(remote=lambda info: SimpleNamespace(future=Future))
    )
    failures = joined(GlooSender(), 3, [present, absent], deadline_s=0.5)
    assert [(f.epoch, f.place) for f in failures][-1] == (3, None)
    wait_until(lambda: present.error is not None)
    assert WIRE_LOST in str(present.error)
