"""Device code in Gluon, run by PyTorch on the CPU: the kernel's own source, warps as threads.

One role runs at a time; at every barrier and copy a seeded choice says who goes on: a role whose
wait is over, or a copy under way. What the hardware leaves open is taken at its worst: shared
memory is NaN before it is written, the target of a copy from when the copy is asked for until it is
done, and a product's operands must be the same when it is queued and when it is waited for. In any
order a wait is an error that the end of an earlier phase of the same parity could end. Layouts mean
nothing here, nor do fences.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from tests.support.gluon_machine import Barriers, Memory, Pointer, Product, Roles, TensorMap

KERNELS = "absorbed_mla.kernels.hopper"


class Emulation:
    """The modules of a kernel, loaded for PyTorch.

    Args:
        seed: Of the order in which roles and copies go on.
    """

    def __init__(self, seed: int = 0):
        self.roles = Roles(seed)
        self.program, self.grid = (0, 0, 0), (1, 1, 1)

    def load(self, module: str) -> ModuleType:
        """A new copy of a module of the kernels package, not shared with other code."""
        package = ModuleType(KERNELS)
        package.__path__ = list(importlib.import_module(KERNELS).__path__)
        with mock.patch.dict(sys.modules):
            for name in [n for n in sys.modules if n.startswith(KERNELS)]:
                del sys.modules[name]
            sys.modules.update({KERNELS: package, **self._triton()})
            return importlib.import_module(f"{KERNELS}.{module}")

    def _triton(self) -> dict[str, ModuleType]:
        name = "triton.experimental.gluon"
        found = {
            each: ModuleType(each)
            for each in (
                "triton.experimental",
                name,
                f"{name}.language",
                f"{name}.language.nvidia.hopper",
                f"{name}.language.nvidia.ampere",
                "triton.language.core",
            )
        }
        outer, gluon, language, hopper, ampere, core = found.values()
        outer.gluon, gluon.language, core._aggregate = gluon, language, lambda cls: cls
        gluon.constexpr_function = lambda function: function
        gluon.jit = self._jit
        vars(language).update(self._language())
        vars(hopper).update(self._hopper())
        ampere.async_copy = self._row_copies()
        return found

    def _jit(self, function=None, **_):
        return _Kernel(function, self) if function else lambda each: _Kernel(each, self)

    def _language(self) -> dict:
        def allocate(dtype, shape, layout):
            if layout == "barriers":
                return Barriers(self.roles, shape[0])
            return Memory.unset(shape, dtype)

        layouts = {
            name: lambda *_, **__: None
            for name in (
                "NVMMADistributedLayout",
                "DistributedLinearLayout",
                "BlockedLayout",
                "DotOperandLayout",
                "NVMMASharedLayout",
                "SwizzledSharedLayout",
                "SliceLayout",
            )
        }
        tensor = torch.as_tensor
        return layouts | {
            "tensor": Tensor,
            "shared_memory_descriptor": Memory,
            "constexpr": lambda value: _Constant(value) if type(value) is int else value,
            "allocate_shared_memory": allocate,
            "arange": lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            "cast": lambda values, dtype, bitcast: values.view(dtype),
            "atomic_add": lambda pointer, value, mask=True, sem=None: pointer.add(value, mask),
            "convert_layout": lambda values, layout, assert_trivial=False: values,
            "exp2": torch.exp2,
            "bfloat16": torch.bfloat16,
            "float32": torch.float32,
            "fma": lambda a, b, c: a * b + c,
            "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            "inline_asm_elementwise": _assembly,
            "int32": torch.int32,
            "int64": torch.int64,
            "barrier": lambda: None,
            "join": lambda a, b: torch.stack((a, b), dim=-1),
            "load": lambda pointer, mask=True, other=None, **_: pointer.load(mask, other),
            "log2": torch.log2,
            "max": lambda values, axis: values.amax(axis),
            "maximum": lambda a, b: torch.maximum(tensor(a), tensor(b)),
            "minimum": lambda a, b: torch.minimum(tensor(a), tensor(b)),
            "num_programs": lambda axis: self.grid[axis],
            "num_warps": lambda: 4,
            "program_id": lambda axis: torch.tensor(self.program[axis], dtype=torch.int32),
            "split": lambda values: values.unbind(-1),
            "static_range": range,
            "store": lambda pointer, value, mask=True, **_: pointer.store(value, mask),
            "sum": lambda values, axis: values.sum(axis),
            "to_tensor": tensor,
            "warp_specialize": lambda roles, warps, registers: self.roles.run(roles),
            "where": lambda which, a, b: torch.where(tensor(which), a, b),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        }

    def _hopper(self) -> dict:
        roles = self.roles

        def arrive(barrier):
            barrier.change(1, 0)
            roles.pause()

        def copy(tensor_map, start, barrier, target):
            assert target.shape == tensor_map.block_shape
            target.spoil()

            def arrives():
                target.data.copy_(tensor_map.box(start))
                barrier.change(0, -tensor_map.block_type.nbytes)

            roles.copies.append(arrives)
            roles.pause()

        def store(tensor_map, start, source):
            values, stores = source.data.clone(), roles.local.stores
            stores.append(SimpleNamespace(done=False))

            def leaves(mine=stores[-1]):
                now, then = (x.nan_to_num(7.0) for x in (source.data, values))
                assert torch.equal(now, then), "what is being stored has changed"
                tensor_map.put(start, values)
                mine.done = True

            roles.copies.append(leaves)
            roles.pause()

        def store_wait(pending):
            stores = roles.local.stores
            earlier = stores[: max(len(stores) - pending, 0)]
            roles.pause(lambda: all(each.done for each in earlier))
            del stores[: len(earlier)]

        def product(left, right, old, use_acc=True, is_async=False):
            roles.local.products.append(Product(left, right, old, use_acc))
            return roles.local.products[-1]

        def wait(pending, deps):
            roles.pause()
            queue = roles.local.products
            while len(queue) > pending:
                queue.pop(0).finish()
            # Before a loop there may be a number in place of a product. A product that is still
            # queued can be waited with, but not read.
            values = tuple(x if x in queue or not isinstance(x, Product) else x.value for x in deps)
            return values if len(values) > 1 else values[0]

        barriers = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.start(count),
            expect=lambda barrier, amount: barrier.change(1, amount),
            arrive=arrive,
            wait=lambda barrier, parity: barrier.wait(parity),
        )
        return {
            "fence_async_shared": lambda: None,
            "mbarrier": barriers,
            "tma": SimpleNamespace(
                async_copy_global_to_shared=copy,
                async_copy_shared_to_global=store,
                store_wait=store_wait,
                tensor_descriptor=TensorMap,
            ),
            "warpgroup_mma": product,
            "warpgroup_mma_init": lambda values: values,
            "warpgroup_mma_wait": wait,
        }

    def _row_copies(self) -> SimpleNamespace:
        """``cp.async``: what is asked for is there when it has been waited for."""
        local = self.roles.local

        def copy(target, pointer, mask):
            target.spoil()
            source = pointer.load(mask, 0.0)
            local.rows.append(lambda: target.data.copy_(source))

        def commit():
            local.groups.append(local.rows)
            local.rows = []

        def wait(pending):
            self.roles.pause()
            while len(local.groups) > pending:
                for arrives in local.groups.pop(0):
                    arrives()

        return SimpleNamespace(
            async_copy_global_to_shared=copy, commit_group=commit, wait_group=wait
        )


def _assembly(assembly, constraints, arguments, dtype, **_):
    """What the instructions that have a result make.

    They are the product of 16-bit numbers, numbers times factors that need not be multiplied if
    all are 1, a number of all threads, and the four values in e4m3 of each word, or their products.
    """
    if assembly.startswith("mul") or "vote" in assembly:
        left, right = arguments
        return left * right
    if assembly.startswith("shfl"):
        return arguments[0]
    if "prefetch" in assembly:
        pointer, size = arguments
        pointer.prefetch(size)
    if "e4m3x2" not in assembly:
        return None
    values = arguments[0].contiguous().view(torch.float8_e4m3fn).float()
    if len(arguments) > 1:  # times scales in bf16, two in a word
        products = (values * arguments[1]).bfloat16().view(torch.int32)
        return products.unflatten(-1, (-1, 2)).unbind(-1)
    return tuple(values.unflatten(-1, (-1, 4)).unbind(-1))


class _Constant(int):
    value = property(int)


class _Kernel:
    """A device function that can be launched on a grid of programs."""

    def __init__(self, function, emulation: Emulation):
        self.function, self.emulation = function, emulation

    def __get__(self, instance, owner):
        return lambda *args: self.function(instance, *args)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps, **constants):
            device = [_argument(each) for each in args]
            self.emulation.grid = grid
            for program in itertools.product(*map(range, grid)):
                self.emulation.program = program
                with self.emulation.roles.alone():
                    self.function(*device, **constants)

        return launch


def _argument(value):
    """The value as device code receives it."""
    if isinstance(value, Tensor):
        return Pointer.to(value)
    return TensorMap(value) if hasattr(value, "block_shape") else value


@contextlib.contextmanager
def emulated(module, name: str, kernel_module: str, seed: int = 0):
    """Within, a launcher's kernel of this name, defined in ``kernel_module``, runs in PyTorch."""
    kernel = getattr(Emulation(seed).load(kernel_module), name)
    with mock.patch.object(module, name, kernel):
        yield
