"""Rows of a latent cache in FP8: what they hold, the same bits by kernels, attention over them."""

from dataclasses import replace

import pytest
import torch

from absorbed_mla import fp8_latents
from absorbed_mla.fp8_latents import E4M3, Fp8Latents
from absorbed_mla.inference.backends.reference import paged_reference
from tests.support.backends import determinism, multiply_in_one_order, triton_interpreter
from tests.support.paged import PagedCase, call_of, fp8_inputs, naive
from tests.support.refusal import refusal
from tests.unit.kernels.paged import (
    DEVICE,
    ON_GPU,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    decoded,
)

with triton_interpreter():
    import absorbed_mla.kernels.paged.forward  # noqa: F401
    from absorbed_mla.kernels import fp8_latents as kernels
    from absorbed_mla.kernels import operators

# kv_lora_rank and rope: DeepSeek-V3's, one small group, a small group behind a whole one, no rope.
WIDTHS = [(512, 64), (24, 8), (160, 16), (20, 0)]
MIXED = PagedCase((1, 3, 0, 5), (70, 3, 9, 150), padding=2)
CASES = {
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (1, 100)},
    "decode": PagedCase((1, 1, 0, 1), (70, 1, 0, 150), heads=16, padding=1),
    "fp16": replace(MIXED, dtype=torch.float16, heads=16),
    "fp32": PagedCase((1, 2), (37, 18), dtype=torch.float32, heads=2, kv_lora_rank=16),
    "no_rope": replace(MIXED, rope=0),
    "four_scales": PagedCase((1, 2), (40, 66), heads=16, kv_lora_rank=512, rope=64, block_size=64),
    "window": replace(MIXED, window=(37, 100)),
}
if ON_GPU:
    DEEP = PagedCase((1, 2, 0, 8), (5000, 333, 64, 777), kv_lora_rank=512, rope=64, block_size=64)
    CASES |= {f"deep_{heads}": replace(DEEP, heads=heads) for heads in (8, 16, 32, 128)}
    CASES["deep_decode"] = replace(DEEP, query_lengths=(1, 1, 0, 1), heads=16)
    CASES["deep_prefill"] = replace(DEEP, query_lengths=(300, 2, 0, 500), heads=16)


def latents_of(width: int, rope: int, tokens: int = 37, dtype=torch.float32) -> torch.Tensor:
    """Of magnitudes from 1e-3 to 1e3."""
    draw = torch.Generator().manual_seed(width)
    kv = torch.randn(tokens, width + rope, generator=draw)
    return (kv * torch.logspace(-3, 3, tokens)[:, None]).to(dtype).to(DEVICE)


class TestRows:
    def test_deepseeks_layout(self):
        """656 bytes: 512 values, 4 scales and 64 numbers of k_rope, in this order."""
        latents, kv = Fp8Latents(512, 64), latents_of(512, 64, dtype=torch.bfloat16)
        rows = latents.encode(kv).cpu()
        assert rows.dtype == torch.uint8 and rows.shape == (37, 656)
        values = rows[:, :512].view(E4M3).double().view(37, 4, 128)
        scales = rows[:, 512:528].clone().view(torch.float32).double()
        assert torch.equal(rows[:, 528:].clone().view(torch.bfloat16), kv[:, 512:].cpu())
        largest = kv[:, :512].cpu().double().view(37, 4, 128).abs().amax(-1)
        torch.testing.assert_close(scales, largest / 448, rtol=1e-6, atol=0)
        assert (values.abs().amax(-1) == 448).all()

    @pytest.mark.parametrize(("width", "rope"), WIDTHS)
    def test_rows_begin_at_multiples_of_16_bytes(self, width, rope):
        latents = Fp8Latents(width, rope)
        assert latents.row_bytes % 16 == 0 and 0 <= latents.row_bytes - latents.used_bytes < 16

    @pytest.mark.parametrize(("width", "rope"), WIDTHS)
    def test_nearest_values(self, width, rope):
        """Half a unit in the last place of e4m3: 2**-4 of a value, or 2**-10 of a scale."""
        latents, kv = Fp8Latents(width, rope), latents_of(width, rope)
        found = latents.decode(latents.encode(kv), torch.float64).cpu()
        kv = kv.cpu().double()
        padded = torch.nn.functional.pad(kv[:, :width], (0, -width % min(128, width)))
        scales = padded.view(37, latents.num_scales, -1).abs().amax(-1) / 448
        scales = scales.repeat_interleave(min(128, width), 1)[:, :width]
        bound = torch.maximum(kv[:, :width].abs() * 2**-4, scales * 2**-10) * (1 + 1e-5)
        assert ((found - kv)[:, :width].abs() <= bound).all()
        assert torch.equal(found[:, width:], kv[:, width:].bfloat16().double())

    def test_nothing_else_is_in_a_row(self):
        """What it begins with, here 255 in every byte as PyTorch fills it, is gone."""
        latents, kv = Fp8Latents(24, 8), latents_of(24, 8)
        with determinism(True):
            rows = latents.encode(kv)
        assert latents.used_bytes == 24 + 4 + 16 < latents.row_bytes == 48
        assert not rows[:, 44:].any() and torch.equal(rows, latents.encode(kv))

    def test_zeros_and_what_is_no_number(self):
        """Nothing hides a NaN or an infinity; other groups and other tokens are as they were."""
        kv = latents_of(160, 16, tokens=4)
        kv[0], kv[1, 3], kv[2, 140] = 0, torch.nan, -torch.inf
        latents = Fp8Latents(160, 16)
        found = latents.decode(latents.encode(kv), torch.float32)
        assert not found[0].any()
        assert found[1, :128].isnan().all() and found[2, 128:160].isnan().all()
        assert found[1, 128:].isfinite().all() and found[2, :128].isfinite().all()
        assert found[3].isfinite().all()

    def test_width_without_a_place_for_scales(self):
        with refusal("latent_cache_dtype='fp8'", "kv_lora_rank", "multiple of 4", "got 22"):
            Fp8Latents(22, 8)

    def test_straight_through(self):
        latents = Fp8Latents.of("fp8", 24, 8)
        kv = latents_of(24, 8).requires_grad_()
        rounded = latents.rounded(kv)
        assert torch.equal(rounded, latents.decode(latents.encode(kv.detach()), kv.dtype))
        assert not torch.equal(rounded, kv)
        weights = torch.randn_like(kv)
        (rounded * weights).sum().backward()
        assert torch.equal(kv.grad, weights)


class TestKernels:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("width", "rope"), WIDTHS)
    def test_same_bits_as_in_torch(self, width, rope, dtype):
        latents = Fp8Latents(width, rope)
        kv = latents_of(width, rope, dtype=dtype).nan_to_num(posinf=60000, neginf=-60000)
        kv[3], kv[4, 5], kv[5, 2] = 0, torch.nan, torch.inf
        expected, found = (
            torch.zeros(37, latents.row_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)
        )
        latents.encode_in_torch(kv, expected)
        with triton_interpreter():
            kernels.encode(kv, *latents.parts(found))
        values, wanted = (latents.parts(rows).values for rows in (found, expected))
        # A NaN may have either sign.
        assert ((values == wanted) | ((values & wanted & 0x7F) == 0x7F)).all()
        for a, b in list(zip(latents.parts(found), latents.parts(expected)))[1:]:
            assert torch.equal(*(x.float().nan_to_num(nan=12345.0) for x in (a, b)))
        read, read_in_torch = torch.empty_like(kv), torch.empty_like(kv)
        latents.decode_in_torch(expected, read_in_torch)
        with triton_interpreter():
            kernels.decode(*latents.parts(expected), read)
        assert torch.equal(*(x.nan_to_num(nan=12345.0) for x in (read, read_in_torch)))

    def test_every_byte(self):
        latents = Fp8Latents(128, 0)
        rows = torch.zeros(2, latents.row_bytes, dtype=torch.uint8, device=DEVICE)
        parts = latents.parts(rows)
        parts.values.copy_(torch.arange(256, device=DEVICE).view(2, 128))
        parts.scales.fill_(1.0)
        found = torch.empty(2, 128, device=DEVICE)
        with triton_interpreter():
            kernels.decode(*parts, found)
        wanted = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128).view(E4M3)
        assert torch.equal(*(x.float().nan_to_num(nan=9999.0) for x in (found, wanted)))

    def test_constants_are_those_of_the_format(self):
        assert fp8_latents.GROUP == kernels.GROUP
        assert kernels._LEAST.value == fp8_latents.LEAST
        assert kernels._RECIPROCAL.value == fp8_latents.RECIPROCAL_OF_LARGEST


def attend(inputs, window=(0, None), batch_invariant=False):
    """Output and LSE by the kernels."""
    call = call_of(inputs, window, batch_invariant=batch_invariant)
    with triton_interpreter():
        return operators.paged_attention_forward(*call)


class TestAttention:
    """Over slots of a larger buffer, with NaN where nothing may be read."""

    @pytest.mark.parametrize("name", CASES)
    def test_kernel(self, name):
        """Against plain PyTorch in fp64 over the same, exact, latents."""
        case = CASES[name]
        inputs, window = fp8_inputs(case, DEVICE), case.window or (0, None)
        assert_equals_reference(attend(inputs, window), decoded(inputs, torch.float64), window)

    @pytest.mark.parametrize(
        "name", ["block_100", "fp16", "four_scales", *(["deep_128"] if ON_GPU else [])]
    )
    def test_parity_mode_has_the_bits_of_decoded_latents(self, name):
        """Which are those of training that attends to these."""
        inputs = fp8_inputs(CASES[name], DEVICE)
        expected = attend(decoded(inputs, CASES[name].dtype), batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True), expected)

    def test_reference(self):
        """The softmax in fp64."""
        case = replace(MIXED, dtype=torch.float64)
        inputs = fp8_inputs(case)
        expected = naive(*decoded(inputs, torch.float64))
        for found, wanted in zip(paged_reference(*inputs), expected):
            torch.testing.assert_close(found, wanted, atol=1e-13, rtol=1e-10)

    def test_parity_mode(self, monkeypatch):
        """Parts of a prompt have the bits of all of it."""
        multiply_in_one_order(monkeypatch)
        inputs = fp8_inputs(PagedCase((40,), (40,), heads=4, block_size=16), DEVICE)
        assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (17, 40), (39, 40)))
