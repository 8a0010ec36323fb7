"""A multiprocessor as device code in Gluon sees it, made of PyTorch and threads.

See :mod:`tests.support.gluon_emulation`.
"""

from __future__ import annotations

import contextlib
import random
import threading
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.support.hostile import fill_with_poison


class Deadlock(RuntimeError):
    """All roles wait, and no copy is under way."""


class Roles:
    """The roles of a program: threads of which one runs at a time."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.waiting: dict[int, tuple[threading.Semaphore, object]] = {}
        self.copies: list = []
        self.errors: list[BaseException] = []
        self.local = threading.local()

    @property
    def known(self) -> dict[Barrier, int]:
        """How many phases of barriers the role that runs knows to be over."""
        return self.local.__dict__.setdefault("known", {})

    def run(self, roles) -> None:
        known = dict(self.known)
        self.left, self.copies, self.waiting, self.errors = len(roles), [], {}, []
        self.done = threading.Event()
        for number in range(len(roles)):
            self.waiting[number] = (threading.Semaphore(0), lambda: True)
        for number, (function, arguments) in enumerate(roles):
            thread = threading.Thread(
                target=self._role, args=(number, function, arguments, known), daemon=True
            )
            thread.start()
        self._next()
        self.done.wait()
        if self.errors:
            raise self.errors[0]
        assert not self.copies, "copies that nobody waited for"

    @contextlib.contextmanager
    def alone(self):
        """Within, a program runs that has no roles, or has not begun them."""
        self.local.number, self.copies = None, []
        with self._finished():
            yield
        assert not self.copies, "copies that nobody waited for"

    @contextlib.contextmanager
    def _finished(self):
        self.local.products, self.local.rows, self.local.groups = [], [], []
        self.local.stores = []
        yield
        assert not self.local.products, "products that nobody waited for"
        assert not self.local.rows + self.local.groups, "copies that nobody waited for"
        assert not self.local.stores, "stores that nobody waited for"

    def _role(self, number, function, arguments, known) -> None:
        self.local.number, self.local.known = number, dict(known)
        self.waiting[number][0].acquire()
        try:
            # A thread has a mode of its own, also for the copies that end when the role has.
            with torch.no_grad():
                with self._finished():
                    function(*arguments)
                self.left -= 1
                if self.left and not self.errors:
                    self._next()
                    return
        except BaseException as error:
            self.errors.append(error)
        self.done.set()

    def pause(self, over=lambda: True) -> None:
        """Let others go on, until a condition holds."""
        if self.local.number is None:
            while not over():
                if not self.copies:
                    raise Deadlock("the program waits for ever")
                self.copies.pop(self.random.randrange(len(self.copies)))()
            return
        semaphore = threading.Semaphore(0)
        self.waiting[self.local.number] = (semaphore, over)
        self._next()
        semaphore.acquire()

    def _next(self) -> None:
        while True:
            ready = [number for number, (_, over) in self.waiting.items() if over()]
            choice = self.random.randrange(len(ready) + len(self.copies) or 1)
            if choice < len(ready):
                return self.waiting.pop(ready[choice])[0].release()
            if not self.copies:
                self.errors.append(Deadlock(f"roles {sorted(self.waiting)} wait for ever"))
                return self.done.set()
            self.copies.pop(choice - len(ready))()


class Barrier:
    """An mbarrier: a phase ends with its arrivals and the bytes announced.

    A wait tells phases by their parity. So who waits must know, from waits of its own and of those
    who arrived there, that the phase before last is over; else the wait could be for that.
    """

    def __init__(self, roles: Roles):
        self.roles, self.count, self.phase = roles, None, 0
        # What those who arrived know, and what one knows who has waited for the last phase.
        self.arrived: dict[Barrier, int] = {}
        self.over: dict[Barrier, int] = {}

    def start(self, count: int) -> None:
        self.count = self.arrivals = count
        self.bytes = 0

    def change(self, arrivals: int, amount: int) -> None:
        self.arrivals -= arrivals
        self.bytes += amount
        assert self.arrivals >= 0, "more arrivals than a phase has"
        if arrivals:
            _learn(self.arrived, self.roles.known)
        if not self.arrivals and not self.bytes:
            self.phase, self.arrivals = self.phase + 1, self.count
            self.over = self.arrived | {self: self.phase}
            if arrivals == self.count:
                _learn(self.roles.known, self.over)

    def wait(self, parity: int) -> None:
        known, parity = self.roles.known, int(parity)
        self.roles.pause(lambda: self.phase % 2 != parity)
        first = known.get(self, 0)
        first += first % 2 == parity
        assert self.phase == first, "a wait that two phases end"
        _learn(known, self.over)


def _learn(known: dict[Barrier, int], more: dict[Barrier, int]) -> None:
    for barrier, phase in more.items():
        known[barrier] = max(phase, known.get(barrier, 0))


class Barriers:
    def __init__(self, roles: Roles, count: int):
        self.all = [Barrier(roles) for _ in range(count)]

    def index(self, index) -> Barrier:
        return self.all[int(index)]

    def __getattr__(self, name):
        """Of one barrier, as if it were that."""
        (barrier,) = self.all
        return getattr(barrier, name)


class Memory:
    """A view of shared memory."""

    def __init__(self, data: Tensor):
        self.data, self.dtype, self.shape = data, data.dtype, list(data.shape)

    @classmethod
    def unset(cls, shape, dtype):
        memory = cls(torch.empty(shape, dtype=dtype))
        memory.spoil()
        return memory

    def spoil(self) -> None:
        """Make it NaN; so are bytes of ones, in e4m3."""
        fill_with_poison(self.data)

    def index(self, index):
        return Memory(self.data[int(index)])

    def slice(self, start, length, dim=0):
        return Memory(self.data.narrow(dim, start, length))

    def reshape(self, shape):
        return Memory(self.data.view(shape))

    def permute(self, order):
        return Memory(self.data.permute(order))

    def _reinterpret(self, dtype, shape, layout):
        size = torch.Size(shape).numel()
        return Memory(self.data.view(-1).view(dtype)[:size].view(shape))

    def load(self, layout):
        return self.data.clone()

    def store(self, values):
        assert values.dtype == self.dtype and list(values.shape) == self.shape
        self.data.copy_(values)


class Pointer:
    """Addresses in a tensor's memory, in elements."""

    def __init__(self, base: Tensor, offset=0):
        self.base, self.offset = base, offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    @classmethod
    def to(cls, x: Tensor):
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.as_strided((size,), (1,), x.storage_offset()))

    def __add__(self, offset):
        return Pointer(self.base, self.offset + offset)

    def __getitem__(self, index):
        return Pointer(self.base, self.offset[index])

    def load(self, mask=True, other=None):
        offset, mask = torch.broadcast_tensors(*map(torch.as_tensor, (self.offset, mask)))
        offset = offset.long()
        inside = (offset >= 0) & (offset < len(self.base))
        assert (inside | ~mask).all(), "read beyond the tensor"
        if other is None:
            assert mask.all(), "what is masked has no value"
            return self.base[offset]
        found = self.base[torch.where(mask, offset, 0)]
        return torch.where(mask, found, torch.tensor(other, dtype=self.base.dtype))

    def prefetch(self, size) -> None:
        """Ask for bytes to come to a cache: all must be there, or the GPU stops."""
        width = self.base.element_size()
        first, size = torch.broadcast_tensors(*map(torch.as_tensor, (self.offset, size)))
        first = first.long() * width
        assert not ((first | size) % 16)[size != 0].any(), "not a multiple of 16 bytes"
        inside = (first >= 0) & (size >= 0) & (first + size <= len(self.base) * width)
        assert (inside | (size == 0)).all(), "asked for beyond the tensor"

    def store(self, value, mask):
        mask = torch.as_tensor(mask)
        offset, value, mask = torch.broadcast_tensors(self.offset, value, mask)
        self.base[offset[mask].long()] = value[mask].to(self.base.dtype)

    def add(self, value, mask):
        """Returns what was there before."""
        tensors = map(torch.as_tensor, (self.offset, value, mask))
        offset, value, mask = torch.broadcast_tensors(*tensors)
        before = self.base[torch.where(mask, offset, 0).long()].clone()
        places = (offset[mask].long(),)
        self.base.index_put_(places, value[mask].to(self.base.dtype), accumulate=True)
        return before


class TensorMap:
    """A tensor as the copy engine (TMA) reads it: zeros beyond its end."""

    def __init__(self, descriptor):
        self.base, self.block_shape = descriptor.base, list(descriptor.block_shape)
        self.layout, self.dtype = None, descriptor.base.dtype
        size = torch.Size(self.block_shape).numel() * descriptor.base.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def box(self, start) -> Tensor:
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        here, there = self._inside(start)
        found[here] = self.base[there]
        return found

    def put(self, start, values: Tensor) -> None:
        here, there = self._inside(start)
        self.base[there] = values.view(self.block_shape)[here]

    def _inside(self, start) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of a box is inside the tensor: where in the box, and where in the tensor."""
        here, there = [], []
        for first, size, length in zip(map(int, start), self.block_shape, self.base.shape):
            low, high = max(first, 0), max(min(first + size, length), max(first, 0))
            here.append(slice(low - first, high - first))
            there.append(slice(low, high))
        return tuple(here), tuple(there)


class Product:
    """An accumulator that is being computed."""

    def __init__(self, left: Memory, right: Memory, old, use_acc: bool):
        self.operands = (left.data, right.data)
        self.queued = [x.clone() for x in self.operands]
        self.old, self.use_acc, self.value = old, use_acc, None

    def finish(self) -> None:
        for now, then in zip(self.operands, self.queued):
            assert torch.equal(now.nan_to_num(), then.nan_to_num()), "an operand has changed"
            assert torch.equal(now.isnan(), then.isnan()), "an operand has changed"
        left, right = self.queued
        old = self.old.value if isinstance(self.old, Product) else self.old
        product = left.float() @ right.float()
        self.value = product + old if self.use_acc else product
