"""Transfer of weights between processes: one sender, and as many receivers as it was told of.

They agree by a store of PyTorch, where the sender listens: which tensors will come, whether all
receivers can take them, and when a bucket has arrived. The buckets themselves take a transport.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.serving.weights.buckets import (
    Bucket,
    buckets_of,
    fill,
    num_bytes,
    require_end,
)
from absorbed_mla.serving.weights.transports import (
    GroupTransport,
    SharedMemoryTransport,
    Transport,
)
from absorbed_mla.serving.weights.update import Shapes

# Seconds between two looks at the store: a share of what has been waited, between these.
_SHORTEST, _SHARE, _LONGEST = 1e-4, 0.05, 5e-3
# The transports by their option.
BACKENDS = ("process_group", "shared_memory")
# What is sent together, in bytes.
BUCKET_BYTES = 256 << 20


class _Store:
    """A store whose reads wait, until ``ended`` gives a reason or ``timeout`` seconds are over."""

    def __init__(
        self, store: dist.Store, timeout: float, ended: Callable[[], str] = lambda: ""
    ) -> None:
        self.store, self._timeout, self._ended = store, timeout, ended

    @property
    def timeout(self) -> timedelta:
        """How long it waits."""
        return timedelta(seconds=self._timeout)

    def take(self, key: str, what: str, *, delete: bool = False) -> bytes:
        """The value of a key; ``what`` is missing in the error if it does not come."""
        begin = time.monotonic()
        while True:
            # Asked before the look: who ends after it may have set the key before.
            ended = self._ended()
            if self.store.check([key]):
                break
            if ended:
                raise RuntimeError(ended)
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise RuntimeError(f"{what} after {self._timeout:g} seconds")
            time.sleep(min(max(_SHORTEST, _SHARE * waited), _LONGEST))
        value = self.store.get(key)
        if delete:
            self.store.delete_key(key)
        return value

    def under(self, prefix: str) -> _Store:
        """The keys that begin with a prefix."""
        return _Store(dist.PrefixStore(prefix, self.store), self._timeout, self._ended)


class Sender:
    """Sends whole tensors to receivers; for one process.

    Args:
        address: ``tcp://HOST:PORT``, where it listens; with port 0 ``address`` says which it got.
        num_receivers, backend, bucket_bytes, timeout: As for ``WeightSender``.
        ended: Why receivers do not go on, if they do not; called while it waits.

    Raises:
        ValueError: If an argument is wrong, or nothing can listen there.
    """

    def __init__(
        self,
        address: str,
        num_receivers: int,
        *,
        backend: str = "process_group",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
        ended: Callable[[], str] = lambda: "",
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        for name, value in (("num_receivers", num_receivers), ("bucket_bytes", bucket_bytes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._backend, self._bucket_bytes = backend, bucket_bytes
        self._ranks = range(1, num_receivers + 1)
        store, self.address = _store_at(address, timeout, listens=True)
        self._store = _Store(store, timeout, ended)
        # Of the receivers that the process group has, and its name in the store.
        self._members: list[str] = []
        self._group: tuple[str, GroupTransport] | None = None

    def send(
        self,
        shapes: Shapes,
        pairs: Callable[[], Iterable[tuple[str, Tensor]]],
        device: torch.device,
    ) -> None:
        """Send tensors to all receivers, which must have asked or ask within the timeout.

        Args:
            shapes: Of all tensors.
            pairs: Called once all receivers accept them; gives them in this order.
            device: Of the tensors.

        Raises:
            ValueError: If a receiver refuses them; nothing is changed then.
            RuntimeError: If a receiver fails, or does not answer in time.
        """
        store, group = self._offer(shapes, device)
        buckets = buckets_of(shapes, self._bucket_bytes)
        with self._transport(group, device) as transport:
            buffers = [transport.buffer(num_bytes(buckets)) for _ in buckets[:2]]
            given, number = iter(pairs()), 0
            try:
                for number, bucket in enumerate(buckets):
                    buffer = buffers[number % len(buffers)]
                    fill(buffer, bucket, given)
                    if number == len(buckets) - 1:
                        require_end(given)
                    # Who has failed would not take part in a broadcast.
                    self._wait_for(store, number - 1)
                    announce = functools.partial(_announce, store, number)
                    transport.send(buffer, bucket[-1].end, announce)
                self._wait_for(store, len(buckets) - 1)
            except BaseException as error:
                self._group = None
                # Now, not when the traceback goes: other ranks may wait for it.
                getattr(given, "close", lambda: None)()
                self._tell(store, number, f"{type(error).__name__}: {error}")
                raise

    def _offer(self, shapes: Shapes, device: torch.device) -> tuple[_Store, str]:
        """Describe the tensors to all receivers, which have to accept them."""
        store = self._store
        tickets = [
            store.take(f"ticket {rank}", f"receiver {rank} has not asked for weights", delete=True)
            for rank in self._ranks
        ]
        asked = [ticket.decode().split() for ticket in tickets]
        members = [member for member, _ in asked]
        if members != self._members:
            self._members, self._group = members, None
        round_, group = uuid.uuid4().hex, self._group[0] if self._group else uuid.uuid4().hex
        offer = {
            "round": round_,
            "group": group,
            "size": len(self._ranks) + 1,
            "backend": self._backend,
            "device": device.type,
            "gpu": _uuid(device),
            "bucket_bytes": self._bucket_bytes,
            "shapes": [(name, str(dtype)[6:], shape) for name, dtype, shape in shapes],
        }
        for _, ticket in asked:
            store.store.set(f"offer {ticket}", json.dumps(offer))
        store = store.under(round_)
        verdicts = {
            rank: store.take(f"verdict {rank}", f"receiver {rank} has not answered").decode()
            for rank in self._ranks
        }
        refused = next((f"receiver {rank}: {one}" for rank, one in verdicts.items() if one), "")
        store.store.set("refused", refused)
        if refused:
            raise ValueError(refused)
        return store, group

    @contextlib.contextmanager
    def _transport(self, group: str, device: torch.device) -> Iterator[Transport]:
        if self._backend == "shared_memory":
            shared = SharedMemoryTransport(len(self._ranks), device)
            with contextlib.closing(shared):
                yield shared
            return
        if self._group is None:
            self._group = group, _group(self._store, group, 0, len(self._ranks) + 1, device)
        yield self._group[1]

    def _tell(self, store: _Store, number: int, failure: str) -> None:
        """Tell receivers that wait for this bucket or the next one that none will come."""
        for key in (f"bucket {n} {rank}" for n in (number, number + 1) for rank in self._ranks):
            if not store.store.check([key]):
                store.store.set(key, failure)

    def _wait_for(self, store: _Store, number: int) -> None:
        """Wait until all receivers have a bucket."""
        for rank in self._ranks if number >= 0 else ():
            what = f"receiver {rank} has not taken bucket {number}"
            if failure := store.take(f"done {number} {rank}", what, delete=True):
                raise RuntimeError(f"receiver {rank} has failed: {failure.decode()}")


class Receiver:
    """Receives the tensors of a :class:`Sender`; one of its receivers.

    Args:
        address: Of the sender.
        rank: From 1, of no other receiver.
        device: Of the model.
        timeout: Seconds that it waits for the sender.

    Raises:
        ValueError: If nobody listens there.
    """

    def __init__(self, address: str, rank: int, device: torch.device, timeout: float) -> None:
        self._rank, self._device = rank, device
        store, _ = _store_at(address, timeout, listens=False)
        self._store = _Store(store, timeout)
        self._member = uuid.uuid4().hex
        self._group: tuple[str, GroupTransport] | None = None

    @property
    def has_process_group(self) -> bool:
        """Whether it has a process group with the sender, which another transfer uses again."""
        return self._group is not None

    def is_connected(self) -> bool:
        """Whether the sender still listens."""
        try:
            self._store.store.check(["offer"])
        except (RuntimeError, OSError):
            return False
        return True

    def receive(self, accept: Callable[[Shapes], None], load: Callable[[Mapping], None]) -> None:
        """Receive all tensors of one ``Sender.send``.

        Args:
            accept: Gets their shapes before any; raises ValueError if it does not want them.
            load: Gets the tensors of each bucket by name, whose memory is not theirs afterwards.

        Raises:
            ValueError: If this receiver or another one has refused them, or nobody sends.
            RuntimeError: If the transfer has failed, of which some may have been loaded.
        """
        offer = self._ask()
        store = self._store.under(offer["round"])
        shapes = [(name, getattr(torch, dtype), tuple(s)) for name, dtype, s in offer["shapes"]]
        error: ValueError | None = None
        try:
            self._require(offer)
            accept(shapes)
        except ValueError as refusal:
            error = refusal
        store.store.set(f"verdict {self._rank}", str(error or ""))
        refused = store.take("refused", "the sender has not gone on").decode()
        if error is not None:
            raise error
        if refused:
            raise ValueError(refused)
        try:
            transport = self._transport(offer)
            for number, bucket in enumerate(buckets_of(shapes, offer["bucket_bytes"])):
                self._load(store, transport, number, bucket, load)
        except BaseException:
            self._group = None
            raise

    def _ask(self) -> dict:
        ticket = uuid.uuid4().hex
        self._store.store.set(f"ticket {self._rank}", f"{self._member} {ticket}")
        try:
            found = self._store.take(f"offer {ticket}", "nobody has sent weights", delete=True)
        except RuntimeError as error:
            self._store.store.delete_key(f"ticket {self._rank}")
            raise ValueError(f"update_weights: {error}") from error
        return json.loads(found)

    def _require(self, offer: dict) -> None:
        if offer["device"] != self._device.type:
            raise ValueError(
                f"weights are sent on {offer['device']!r}, and this model is on "
                f"{self._device.type!r}"
            )
        gpu = _uuid(self._device)
        if offer["backend"] == "process_group" and gpu and gpu == offer["gpu"]:
            raise ValueError(
                f"backend 'process_group' needs another GPU than the sender's, {gpu}, which this "
                "model is on: NCCL refuses two ranks of one; 'shared_memory' takes it"
            )
        if not 1 <= self._rank < offer["size"]:
            raise ValueError(
                f"rank_offset must give ranks from 1 to num_receivers {offer['size'] - 1}, got "
                f"rank {self._rank}"
            )

    def _transport(self, offer: dict) -> Transport:
        if offer["backend"] == "shared_memory":
            return SharedMemoryTransport(0, self._device)
        name = offer["group"]
        if self._group is None or self._group[0] != name:
            self._group = None
            made = _group(self._store, name, self._rank, offer["size"], self._device)
            self._group = name, made
        return self._group[1]

    def _load(
        self,
        store: _Store,
        transport: Transport,
        number: int,
        bucket: Bucket,
        load: Callable[[Mapping], None],
    ) -> None:
        key = f"bucket {number} {self._rank}"
        message = store.take(key, f"bucket {number} has not come", delete=True)
        if not message.startswith(b"+"):
            raise RuntimeError(f"the sender has failed: {message.decode()}")
        failure = "ended"
        try:
            buffer = transport.receive(message[1:], bucket[-1].end)
            load({slot.name: slot.of(buffer) for slot in bucket})
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            failure = ""
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            store.store.set(f"done {number} {self._rank}", failure)


def _uuid(device: torch.device) -> str:
    """Of a GPU; "" of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _store_at(address: str, timeout: float, *, listens: bool) -> tuple[dist.Store, str]:
    """The store at an address, and the address with its port.

    Raises:
        ValueError: If it is no address, or there is nothing to be had.
    """
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal():
        raise ValueError(f"the address must be tcp://HOST:PORT, got {address!r}")
    try:
        store = dist.TCPStore(
            host,
            int(port),
            is_master=listens,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        what = "cannot listen at" if listens else "nobody sends weights at"
        raise ValueError(f"{what} {address}: {error}") from error
    return store, f"tcp://{host}:{store.port}"


def _group(store: _Store, name: str, rank: int, size: int, device: torch.device) -> GroupTransport:
    return GroupTransport(store.under(name).store, rank, size, device, store.timeout)


def _announce(store: _Store, number: int, messages: list[bytes]) -> None:
    """Tell receivers of a bucket, each by a message of its own."""
    for rank, message in enumerate(messages, 1):
        store.store.set(f"bucket {number} {rank}", b"+" + message)
