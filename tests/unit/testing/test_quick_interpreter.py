"""Triton's interpreter, some parts of which the tests replace: they do what Triton's own do."""

import pytest
import triton.language as tl

from tests.support import quick_interpreter


@pytest.mark.parametrize("element", [tl.float32, tl.pointer_type(tl.bfloat16)], ids=str)
@pytest.mark.parametrize("shape", [[16], [2, 1, 64], [tl.constexpr(4), 8]], ids=len)
class TestTypes:
    def test_of_blocks(self, element, shape):
        found, expected = (object.__new__(tl.block_type) for _ in range(2))
        quick_interpreter.init_block_type(found, element, shape)
        quick_interpreter._init_block_type(expected, element, shape)
        assert vars(found).keys() == vars(expected).keys()
        assert found == expected and found.name == expected.name
        assert (found.numel, [*found.shape]) == (expected.numel, [*expected.shape])
        assert (found.scalar, found.mangle()) == (expected.scalar, expected.mangle())

    def test_of_tensors(self, element, shape):
        block = tl.block_type(element, shape)
        found, expected = (object.__new__(tl.tensor) for _ in range(2))
        quick_interpreter.init_tensor(found, "handle", block)
        quick_interpreter._init_tensor(expected, "handle", block)
        assert vars(found).keys() == vars(expected).keys()
        assert (found.handle, found.type, found.dtype) == (
            expected.handle,
            expected.type,
            expected.dtype,
        )
        assert found.numel.value == expected.numel.value
        assert [size.value for size in found.shape] == [size.value for size in expected.shape]


def test_a_scalar():
    scalar = tl.tensor("handle", tl.int32)
    assert scalar.numel.value == 1 and len(scalar.shape) == 0


@pytest.mark.parametrize("shape", [[3], [2**21], []], ids=str)
def test_shapes_that_triton_refuses(shape):
    errors = []
    for init in (quick_interpreter.init_block_type, quick_interpreter._init_block_type):
        with pytest.raises((TypeError, ValueError)) as refused:
            init(object.__new__(tl.block_type), tl.int8, shape)
        errors.append((type(refused.value), str(refused.value)))
    assert errors[0] == errors[1]


def test_other_releases_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(quick_interpreter.triton, "__version__", "9.0.0")
    monkeypatch.setattr(quick_interpreter.tl.tensor, "__init__", quick_interpreter._init_tensor)
    quick_interpreter.quicken.__wrapped__()
    assert tl.tensor.__init__ is quick_interpreter._init_tensor
