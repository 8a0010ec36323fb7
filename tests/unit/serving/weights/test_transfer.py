"""Buckets of tensors between a sender and receivers in threads: bits, memory, failures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from absorbed_mla.serving.weights import transfer
from absorbed_mla.serving.weights.buckets import buckets_of, num_bytes
from absorbed_mla.serving.weights.transfer import Receiver, Sender
from tests.support import needs
from tests.support.memory import PeakMemory

pytestmark = needs.no_gpu

CPU = torch.device("cpu")
BUCKET = 1 << 16
SHAPES = [
    ("odd", torch.bfloat16, (3, 7)),
    *((f"layer {i}", torch.float32, (100, 50)) for i in range(20)),
    ("empty", torch.float32, (0, 5)),
    ("large", torch.bfloat16, (300, 200)),
    ("bias", torch.float32, ()),
]


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, dtype, shape in SHAPES}


def receive(receiver: Receiver, fails_at: str = "") -> tuple[dict, int]:
    """Copies of what comes, and the most bytes that were held for it."""
    found, held = {}, PeakMemory()

    def load(arrived):
        for name, tensor in arrived.items():
            if name == fails_at:
                raise RuntimeError("out of memory")
            found[name] = tensor.tolist()

    with held:
        receiver.receive(lambda shapes: None, load)
    return found, held.peak


@pytest.fixture(params=["process_group", "shared_memory"])
def sender(request):
    return Sender("tcp://127.0.0.1:0", 2, backend=request.param, bucket_bytes=BUCKET, timeout=20.0)


@pytest.fixture
def receivers(sender):
    return [Receiver(sender.address, rank, CPU, 20.0) for rank in (1, 2)]


def sent(sender, receivers, given, fails_at=("", "")):
    """What each receiver got, or its error; and the most bytes that the sender held."""
    held = PeakMemory()
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(receive, *each) for each in zip(receivers, fails_at)]
        try:
            with held:
                sender.send(SHAPES, lambda: iter(given.items()), CPU)
        finally:
            found = [answer.exception() or answer.result() for answer in answers]
    return found, held.peak


def test_buckets():
    """In order, aligned, within the size but for a tensor that is larger."""
    buckets = buckets_of(SHAPES, BUCKET)
    assert [slot.name for bucket in buckets for slot in bucket] == [name for name, *_ in SHAPES]
    assert all(slot.start % 16 == 0 for bucket in buckets for slot in bucket)
    sizes = [bucket[-1].end for bucket in buckets]
    assert sorted(sizes)[-2] <= BUCKET < num_bytes(buckets) == 300 * 200 * 2
    assert num_bytes([]) == 0


def test_bits_and_memory(sender, receivers):
    """Twice, with other values: two buckets at the sender, one at a receiver."""
    most = num_bytes(buckets_of(SHAPES, BUCKET))
    for _ in range(2):
        given = tensors()
        found, held = sent(sender, receivers, given)
        assert [got for got, _ in found] == [{k: x.tolist() for k, x in given.items()}] * 2
        assert held <= 2 * most + 4096
        # What is shared is the sender's memory.
        shared = sender._backend == "shared_memory"
        assert max(peak for _, peak in found) <= (1 + shared) * most + 4096


def test_a_receiver_that_fails(sender, receivers):
    """The sender hears of it, and tells the other one; the next transfer succeeds."""
    given = tensors()
    with pytest.raises(RuntimeError, match="receiver 2 has failed: RuntimeError: out of memory"):
        sent(sender, receivers, given, ("", "layer 5"))
    found, _ = sent(sender, receivers, given)
    assert [len(got) for got, _ in found] == [len(given)] * 2


def test_a_receiver_that_refuses(sender, receivers):
    def refuse(shapes):
        raise ValueError("no layer 3 here")

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(receive, receivers[0])
        two = threads.submit(receivers[1].receive, refuse, None)
        with pytest.raises(ValueError, match="receiver 2: no layer 3 here"):
            sender.send(SHAPES, lambda: pytest.fail("nothing is sent"), CPU)
        assert str(one.exception()) == "receiver 2: no layer 3 here"
        assert str(two.exception()) == "no layer 3 here"


def test_receivers_that_ended(sender, receivers):
    """Their end is a reason only where they have left no answer before it."""
    calls = []

    def ended() -> str:
        calls.append(1)
        if len(calls) == 2:
            receivers[0]._store.store.set("answer", "yes")
        return "over" if len(calls) >= 2 else ""

    sender._store._ended = ended
    assert sender._store.take("answer", "no answer") == b"yes" and len(calls) == 2
    with pytest.raises(RuntimeError, match=r"^over$"):
        sender._store.take("another", "no answer")


def test_nobody_sends(sender, monkeypatch):
    """A receiver that gave up leaves nothing that a later transfer would wait for."""
    late = Receiver(sender.address, 1, CPU, 0.05)
    with pytest.raises(ValueError, match=r"nobody has sent weights after 0\.05 seconds"):
        late.receive(None, None)
    assert not sender._store.store.check(["ticket 1"])
    monkeypatch.setattr(sender._store, "_timeout", 0.05)
    with pytest.raises(RuntimeError, match="receiver 1 has not asked for weights after"):
        sender.send(SHAPES, lambda: (), CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tcp"}, "backend must be one of process_group, shared_memory, got 'tcp'"),
        ({"num_receivers": 0}, "num_receivers must be at least 1, got 0"),
        ({"address": "tcp://127.0.0.1"}, "the address must be tcp://HOST:PORT"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        transfer.Sender(**{"address": "tcp://127.0.0.1:0", "num_receivers": 1, **options})
