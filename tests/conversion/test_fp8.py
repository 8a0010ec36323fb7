"""Block-scaled FP8, against a loop over blocks written from its definition."""

import math
import re

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.fp8 import (
    FP8,
    dequantise,
    dequantised,
    pair_problems,
    quantise,
    quantised,
    scale_shape,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import rows_by_name
from tests.conversion.support import V2_LITE, V32, PeakMemory, lazy, load_all, refused, tiny_config

# 576 rows are DeepSeek's kv_a_proj_with_mqa: four and a half blocks.
SHAPES = [(576, 256), (128, 128), (200, 131), (1, 1), (129, 300), (256, 127), (3, 640)]
# Too large for dtypes that have the range of float32.
WIDE = [(dtype, 1e38, "inf") for dtype in (torch.bfloat16, torch.float32)]
SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]


def random_pair(shape: tuple[int, int], scale_dtype=torch.float32) -> tuple[Tensor, Tensor]:
    weight = (100 * torch.randn(shape)).clamp(-448, 448).to(FP8)
    blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    if scale_dtype == torch.float8_e8m0fnu:
        return weight, (2.0 ** torch.randint(-20, 3, blocks)).to(scale_dtype)
    return weight, (0.001 + torch.rand(blocks)).to(scale_dtype)


def by_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    result = torch.zeros(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            result[block] = weight[block].float() * scale[i, j].float()
    return result


class TestDequantise:
    @pytest.mark.parametrize("scale_dtype", SCALES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_against_a_loop_over_blocks(self, shape, scale_dtype):
        weight, scale = random_pair(shape, scale_dtype)
        expected = by_blocks(weight, scale)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(dequantise(weight, scale, dtype, "w"), expected.to(dtype))

    def test_powers_of_two_stored_as_floats(self):
        weight, scale = random_pair((300, 200), torch.float8_e8m0fnu)
        a = dequantise(weight, scale, torch.bfloat16, "w")
        assert torch.equal(a, dequantise(weight, scale.float(), torch.bfloat16, "w"))

    def test_every_fp8_value(self):
        """Also zeros of both signs, and numbers below the normal ones."""
        values = torch.arange(256, dtype=torch.uint8).view(FP8)
        values = values[values.float().isfinite()].reshape(2, -1)
        assert values.numel() == 254
        result = dequantise(values, torch.ones(1, 1), torch.float32, "w")
        assert torch.equal(result, values.float())
        assert torch.equal(result.signbit(), values.float().signbit())

    def test_weight_that_is_not_contiguous(self):
        weight, scale = random_pair((256, 512))
        part = weight[:, 128:384]
        expected = by_blocks(part, scale[:, 1:3])
        assert torch.equal(dequantise(part, scale[:, 1:3], torch.float32, "w"), expected)

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_not_a_number(self, code):
        weight = torch.zeros(200, 200, dtype=torch.uint8)
        weight[199, 199] = code
        with refused("layer.weight holds FP8 values that are not"):
            dequantise(weight.view(FP8), torch.ones(2, 2), torch.bfloat16, "layer.weight")

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_scale_that_is_not_finite(self, bad):
        weight, scale = random_pair((200, 200))
        scale[1, 0] = bad
        with refused("w_scale_inv holds scales that are not finite"):
            dequantise(weight, scale, torch.bfloat16, "w")

    @pytest.mark.parametrize(("dtype", "scale", "shown"), [(torch.float16, 200.0, "89600"), *WIDE])
    def test_values_that_the_dtype_cannot_hold(self, dtype, scale, shown):
        weight = torch.full((1, 1), 448.0).to(FP8)
        with refused(f"w has values up to {shown}, which {dtype} can"):
            dequantise(weight, torch.full((1, 1), scale), dtype, "w")
        small = torch.ones(1, 1).to(FP8)
        assert dequantise(small, torch.full((1, 1), scale), dtype, "w").isfinite().all()

    def test_little_memory_beside_the_result(self):
        """The whole weight in float32 would be another 134 MB."""
        weight = torch.ones(8192, 4096).to(FP8)
        scale = torch.ones(64, 32)
        memory = PeakMemory()
        result = dequantise(weight, scale, torch.bfloat16, "w")
        assert memory.growth < result.nbytes + (16 << 20)
        assert (result == 1).all()


class TestLazily:
    def test_whole(self):
        weight, scale = random_pair((576, 300))
        tensor = dequantised(lazy("w", weight), lazy("w_scale_inv", scale), torch.bfloat16)
        assert (tensor.shape, tensor.dtype) == ((576, 300), torch.bfloat16)
        assert tensor.leaves == {"w", "w_scale_inv"}
        assert tensor.peak >= weight.nbytes + scale.nbytes + tensor.nbytes
        assert torch.equal(load_all({"x": tensor})["x"], by_blocks(weight, scale).bfloat16())

    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize(
        ("start", "length"), [(0, 128), (128, 256), (0, 1), (127, 2), (130, 300), (512, 64)]
    )
    def test_parts_need_only_their_blocks(self, dim, start, length):
        weight, scale = random_pair((576, 576))
        reads: list[int] = []
        tensor = dequantised(recording("w", weight, reads), lazy("s", scale), torch.float32)
        part = tensor.narrow(dim, start, length)
        expected = by_blocks(weight, scale).narrow(dim, start, length)
        assert part.shape == tuple(expected.shape)
        assert torch.equal(load_all({"x": part})["x"], expected)
        blocks = (start + length + 127) // 128 - start // 128
        assert sum(reads) <= 576 * 128 * blocks
        # And parts of parts, which layouts and ranks make.
        again = part.narrow(1 - dim, 100, 200).narrow(dim, 0, max(1, length // 2))
        expected = expected.narrow(1 - dim, 100, 200).narrow(dim, 0, max(1, length // 2))
        assert torch.equal(load_all({"x": again})["x"], expected)

    def test_quantised_once_per_session(self):
        loads = []

        def load(session: ReadSession) -> Tensor:
            loads.append(1)
            return values

        values = torch.randn(200, 300)
        source = LazyTensor((200, 300), torch.float32, load, frozenset({"w"}), values.nbytes)
        result = quantised(source, "float")
        with ReadSession() as session:
            weight, scale = (one.load(session) for one in result.stored.values())
            error = result.error(session)
        assert len(loads) == 1
        expected = quantise(values, "float", "w")
        assert torch.equal(weight.float(), expected[0].float())
        assert torch.equal(scale, expected[1])
        assert error == expected[2]
        found = {suffix: (one.shape, one.dtype) for suffix, one in result.stored.items()}
        assert found == {"": ((200, 300), FP8), "_scale_inv": ((2, 3), torch.float32)}
        assert all(one.leaves == {"w"} for one in result.stored.values())


def recording(name: str, tensor: Tensor, reads: list[int]) -> LazyTensor:
    """A lazy tensor that says how many values were read of it."""

    def load(session: ReadSession) -> Tensor:
        reads.append(tensor.numel())
        return tensor

    def part(dim: int, start: int, length: int) -> LazyTensor:
        return recording(name, tensor.narrow(dim, start, length), reads)

    shape = tuple(tensor.shape)
    return LazyTensor(shape, tensor.dtype, load, frozenset({name}), tensor.nbytes, part)


class TestQuantise:
    @pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_error_is_within_the_format(self, shape, dtype, scale_format):
        values = torch.randn(shape).to(dtype)
        weight, scale, error = quantise(values, scale_format, "w")
        assert (weight.dtype, scale.dtype) == (FP8, torch.float32)
        assert scale.shape == scale_shape(shape)
        back, exact = by_blocks(weight, scale), values.float()
        # Three bits of mantissa: half a step is 1/16 at most; below the normal numbers, 2**-10.
        steps = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        steps = steps[: shape[0], : shape[1]]
        allowed = torch.maximum(exact.abs() / 16, steps * 2.0**-10)
        assert ((back - exact).abs() <= 1.001 * allowed).all()
        difference = (back - exact).double()
        assert error.max == pytest.approx((difference.abs().max() / exact.abs().max()).item())
        assert error.rms == pytest.approx((difference.norm() / exact.double().norm()).item())
        assert 0 < error.rms < 0.05 or values.numel() == 1

    def test_scales_just_fit(self):
        values = torch.randn(576, 300)
        blocks = torch.nn.functional.pad(values, (0, 84, 0, 64)).view(5, 128, 3, 128)
        largest = blocks.abs().amax(dim=(1, 3))
        weight, scale, _ = quantise(values, "float", "w")
        assert torch.equal(scale, largest / 448)
        _, power, _ = quantise(values, "ue8m0", "w")
        assert torch.equal(power, 2.0 ** power.log2().round())
        assert (power >= largest / 448).all() and (power / 2 < largest / 448).all()
        codes = torch.nn.functional.pad(weight.float(), (0, 84, 0, 64)).view(5, 128, 3, 128)
        assert (codes.abs().amax(dim=(1, 3)) == 448).all()

    @pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
    @pytest.mark.parametrize(
        "largest", [448.0, 448.0001, 447.9999, 1e-45, 1e-38, 1e-30, 3e38, 2.0**-120, 1.0]
    )
    def test_extremes(self, largest, scale_format):
        values = torch.tensor([[largest, -largest, largest / 3, 0.0]])
        weight, scale, _ = quantise(values, scale_format, "w")
        assert scale.isfinite().all() and (scale > 0).all()
        assert weight.float().isfinite().all()
        if largest > 1e-35:
            relative = by_blocks(weight, scale)[0, :3] / values[0, :3] - 1
            assert relative.abs().max() < 1 / 16

    def test_zeros(self):
        values = torch.zeros(200, 200)
        values[:, 150:] = 1.0
        weight, scale, error = quantise(values, "float", "w")
        assert torch.equal(by_blocks(weight, scale), values)
        assert torch.equal(scale[:, 0], torch.ones(2))
        assert (error.max, error.rms) == (0.0, 0.0)
        assert quantise(torch.zeros(3, 3), "ue8m0", "w")[2].rms == 0.0

    def test_what_was_quantised_stays(self):
        """FP8 to float32 and back with powers of two changes nothing."""
        weight, scale = random_pair((300, 300), torch.float8_e8m0fnu)
        weight[::64, ::64] = torch.tensor(448.0).to(FP8)  # each block uses its whole range
        values = dequantise(weight, scale, torch.float32, "w")
        again, scale_again, error = quantise(values, "ue8m0", "w")
        assert torch.equal(scale_again, scale.float())
        assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
        assert (error.max, error.rms) == (0.0, 0.0)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("place", [(0, 0), (575, 299), (130, 200)])
    def test_not_finite(self, bad, place):
        values = torch.randn(576, 300)
        values[place] = bad
        with refused("layer.weight holds values that are not"):
            quantise(values, "float", "layer.weight")


def test_which_weights_are_quantised():
    linear = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    mlps = ["", "experts.#.", "shared_experts."]
    quantised = {f"self_attn.{name}.weight" for name in linear}
    quantised |= {f"mlp.{m}{p}_proj.weight" for m in mlps for p in ("gate", "up", "down")}
    quantised |= {f"self_attn.indexer.{name}.weight" for name in ("wq_b", "wk")}
    other = {"self_attn.indexer.weights_proj", "self_attn.indexer.k_norm", "mlp.gate"}
    other |= {"self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "input_layernorm"}
    other |= {"post_attention_layernorm", "eh_proj", "enorm", "hnorm", "shared_head.norm"}
    other = {f"{name}.weight" for name in other}
    other |= {"self_attn.indexer.k_norm.bias", "mlp.gate.e_score_correction_bias"}
    other |= {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for changes in ({**V32, "num_nextn_predict_layers": 1}, V2_LITE):
        for name, row in rows_by_name(tiny_config(**changes)).items():
            inner = re.sub(r"^model\.layers\.\d+\.", "", name)
            found[row.fp8].add(re.sub(r"\.\d+\.", ".#.", inner))
    assert found == {True: quantised, False: other}


def test_problems_of_pairs():
    weight, scale = random_pair((576, 256))
    good = lazy("w", weight)
    assert pair_problems("w", good, lazy("s", scale)) == []
    cases = [
        (good, None, "w_scale_inv is missing; expected shape (5, 2)"),
        (good, lazy("s", scale[:4]), "shape (4, 2); expected (5, 2)"),
        (good, lazy("s", scale.flatten()), "shape (10,); expected (5, 2)"),
        (good, lazy("s", scale.to(torch.int32)), "is torch.int32; expected one of float32"),
        (lazy("w", weight.flatten()), lazy("s", scale), "only matrices"),
    ]
    for first, second, why in cases:
        (problem,) = pair_problems("w", first, second)
        assert why in problem
    assert len(pair_problems("w", good, lazy("s", scale[:4].double()))) == 2
