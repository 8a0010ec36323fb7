"""A prepared launch takes what Triton would take: its compiler is replaced, nothing runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from absorbed_mla.kernels import launch as launching
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.launch import launch


class Compiled(CompiledKernel):
    """What the compiler would return, which only notes its launches."""

    module, function, packed_metadata = "loaded", None, None

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def launch_metadata(self, *_):
        return None

    @property
    def run(self):
        return lambda *args: self.launches.append((args[:3], args[9:]))


class Kernel(JITFunction):
    """A kernel that Triton believes it has compiled, counting how often it was asked."""

    def create_binder(self):
        found = super().create_binder()
        self.compile = lambda *_, **__: Compiled()
        return found

    def run(self, *args, **kwargs):
        self.asked = getattr(self, "asked", 0) + 1
        return super().run(*args, **kwargs)

    def choice(self, *args, **constants) -> Compiled:
        """The kernel that Triton takes for these arguments."""
        return super().run(*args, grid=None, warmup=True, **constants)


def kernel(operand, number, factor, WIDTH: gl.constexpr, FLAG: gl.constexpr):
    """Never compiled."""


DEVICE = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: DEVICE.index,
    get_current_stream=lambda device=None: 0,
    index=0,
)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(driver, "_active", DEVICE)
    monkeypatch.setattr(launching, "_prepared", {})
    monkeypatch.setattr(DEVICE, "index", 0)


def operands() -> dict[str, object]:
    whole = torch.zeros(64 * 128, dtype=torch.bfloat16)
    boxes = {
        "map": ((64, 128), (16, 64), None),
        "longer": ((128, 64), (16, 64), None),
        "wider box": ((64, 128), (16, 128), None),
        "without swizzle": ((64, 128), (16, 64), gl.NVMMASharedLayout(0, 16)),
    }
    maps = {name: tensor_map(whole.view(shape), *box) for name, (shape, *box) in boxes.items()}
    fp16 = tensor_map(whole.view(64, 128).half(), (16, 64))
    return maps | {
        "map of fp16": fp16,
        "aligned": whole,
        "odd address": whole[1:],
        "fp32": whole.float(),
        "integers": whole.int(),
        "none": None,
        "number": 3,
    }


NUMBERS = (0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**32, 2**63, -(2**31), -(2**31) - 1)
CONSTANTS = (
    {"WIDTH": 16, "FLAG": False, "num_warps": 4},
    {"WIDTH": 32, "FLAG": False, "num_warps": 4},
    {"WIDTH": 16, "FLAG": True, "num_warps": 4},
    {"WIDTH": 16, "FLAG": False, "num_warps": 8},
)


@pytest.mark.parametrize("unspecialised", [(), ("number", "operand")])
def test_takes_what_triton_takes(unspecialised):
    """Each of two launches after the other, so that the second might take the first's."""
    jitted = Kernel(kernel, do_not_specialize=unspecialised)
    cases = [
        (operand, number, 0.5, constants)
        for (operand, number), constants in itertools.chain(
            itertools.product(
                [(x, 3) for x in operands().values()] + [(None, n) for n in NUMBERS], CONSTANTS[:1]
            ),
            itertools.product([(None, 3)], CONSTANTS),
        )
    ]
    for _ in range(2):
        for *args, constants in cases:
            launch(jitted, (3, 2), *args, **constants)
            chosen = jitted.choice(*args, **constants)
            names = [name for name in constants if name != "num_warps"]
            expected = (3, 2, 1), (*args, *(constants[name] for name in names))
            assert same(chosen.launches.pop(), expected)
            assert not chosen.launches
    assert jitted.asked == len(launching._prepared), "Triton was asked once for each kind"


def same(found: tuple, expected: tuple) -> bool:
    """Whether the grid is equal and the arguments are the same objects, or equal numbers."""
    pairs = [*zip(found[1], expected[1], strict=True)]
    return found[0] == expected[0] and all(
        x is y or (type(x) is type(y) in (int, float) and x == y) for x, y in pairs
    )


def test_asks_triton_once_for_tensors_of_any_length():
    jitted, constants = Kernel(kernel), CONSTANTS[0]
    for tokens in (8, 16, 24):
        x = tensor_map(torch.zeros(tokens, 64).bfloat16(), (8, 64))
        launch(jitted, (tokens,), x, 3 * tokens + 1, tokens / 7, **constants)
    assert jitted.asked == 1
    assert jitted.choice(x, 3, 0.5, **constants).launches[-1][0] == (24, 1, 1)


def test_every_device_has_its_own():
    jitted, constants = Kernel(kernel), CONSTANTS[0]
    for DEVICE.index in (0, 1, 0, 1):
        launch(jitted, (1,), None, 3, 0.5, **constants)
        chosen = jitted.choice(None, 3, 0.5, **constants)
        assert len(chosen.launches) == 1
        chosen.launches.clear()
    assert jitted.asked == 2


def test_every_kernel_has_its_own():
    one, other = Kernel(kernel), Kernel(kernel)
    for jitted in (one, other, one):
        launch(jitted, (1,), None, 3, 0.5, **CONSTANTS[0])
    choices = (jitted.choice(None, 3, 0.5, **CONSTANTS[0]) for jitted in (one, other))
    assert [len(choice.launches) for choice in choices] == [2, 1]


def test_constants_among_the_arguments():
    jitted = Kernel(kernel)
    for width in (16, 32, 16):
        launch(jitted, (1,), None, 3, 0.5, width, FLAG=False)
    launches = [len(jitted.choice(None, 3, 0.5, width, FLAG=False).launches) for width in (16, 32)]
    assert launches == [2, 1] and jitted.asked == 2


@pytest.mark.parametrize(
    "args, constants",
    [
        ((None, 3), {"factor": 0.5, "WIDTH": 16, "FLAG": False}),
        ((None, True, 0.5), {"WIDTH": 16, "FLAG": False}),
        ((torch.nn.Parameter(torch.zeros(4)), 3, 0.5), {"WIDTH": 16, "FLAG": False}),
    ],
    ids=["argument among the constants", "bool", "other tensors"],
)
def test_what_it_does_not_know_is_tritons(args, constants):
    jitted = Kernel(kernel)
    for _ in range(2):
        launch(jitted, (1,), *args, **constants)
    assert jitted.asked == 2 and not launching._prepared


def test_what_stands_for_a_kernel_is_called_as_it_is():
    stand_in = mock.MagicMock()
    launch(stand_in, (4,), 1, WIDTH=16)
    stand_in.__getitem__.assert_called_once_with((4,))
    stand_in[(4,)].assert_called_once_with(1, WIDTH=16)


def test_what_was_not_compiled_is_not_kept():
    """A hook of Triton's may compile elsewhere; then there is nothing to launch."""
    jitted = Kernel(kernel)
    with mock.patch.object(JITFunction, "run", lambda *_, **__: None):
        launch(jitted, (1,), None, 3, 0.5, **CONSTANTS[0])
    assert not launching._prepared
