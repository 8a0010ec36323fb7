"""The layer with a latent cache in FP8, against the float64 oracle and against training."""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.core_attention.backends import triton
from absorbed_mla.inference import backend
from absorbed_mla.inference.backend import PagedRequest, choose
from tests import oracle
from tests.support import needs
from tests.support.cases import TINY, random_weights
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    named_tensors,
    run,
)
from tests.support.inference import infer_in_steps
from tests.support.layouts import dense, packed
from tests.support.numerics import compare, relative_error
from tests.support.parity import differences, parity_model
from tests.support.refusal import refusal

TOKENS, BATCH = 12, 3
CUTS = {"prefill": (12,), "tokens": (3, 2, 2, 1, 4)}
FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}
REQUEST = PagedRequest(
    torch.device("cuda"), torch.bfloat16, 16, 512, 64, 64, latent_cache_dtype="fp8"
)
# A group of 128 and a smaller one.
WIDER = replace(TINY, kv_lora_rank=160)


def cached(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """What an FP8 cache makes of float64 keys, by arithmetic alone; straight-through gradients.

    e4m3 has 3 bits of mantissa down to an exponent of -6, scales are fp32 and k_rope is bf16.
    """
    groups = []
    for group in latent.detach().split(128, dim=-1):
        scale = (group.abs().amax(-1, keepdim=True).float() * (1 / 448)).double()
        x = group.float().double() / scale
        exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0**-60))).clamp(min=-6)
        step = 2.0 ** (exponent - 3)
        groups.append((torch.round(x / step) * step * scale).float().double())
    rounded = torch.cat(groups, dim=-1), k_rope.detach().bfloat16().double()
    return tuple(x + (r - x).detach() for x, r in zip((latent, k_rope), rounded))


def layer(mla, setup: Setup, seed: int = 0):
    """With the weights of the oracle."""
    weights = random_weights(mla, seed)
    attention = build_attention(mla, setup)
    load_weights(attention, mla, setup, weights)
    return attention, weights


@pytest.mark.parametrize("resident", [None, 5])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
def test_inference_equals_the_oracle_of_rounded_latents(form, cuts, resident):
    """However the tokens are cut; also where most of the rows are in host memory."""
    setup = Setup(form=form, latent_cache_dtype="fp8", latent_cache_tokens=resident)
    attention, weights = layer(TINY, setup)
    layout = dense(TOKENS, BATCH)
    x = layout.random_rows(TINY.hidden, 1)
    found = infer_in_steps(attention.eval(), setup, x, CUTS[cuts]).flatten(0, 1).cpu()
    table, rows = module_table(attention, TINY, layout), x.flatten(0, 1)
    plain, rounded = (
        oracle.forward(mla, weights, rows, layout.sequences, table)
        for mla in (TINY, replace(TINY, cached=cached))
    )
    assert relative_error(found, rounded) < 1e-9
    assert 1e-3 < relative_error(found, plain) < 0.1


@pytest.mark.parametrize("mla", [TINY, WIDER], ids=["one_scale", "two_scales"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("layout", [dense(9, 2), packed((5, 1, 7))], ids=["dense", "packed"])
def test_training_equals_the_oracle_of_rounded_latents(form, mla, layout):
    """Output, input gradient and every parameter's gradient; also where they are recomputed."""
    recompute = ("mla_up_proj", "core_attn") if form == "absorbed" else ()
    setup = Setup(form=form, recompute=recompute, **FP8)
    attention, weights = layer(mla, setup)
    x, output_grad = (layout.random_rows(mla.hidden, seed) for seed in (1, 2))
    found = run(attention, mla, setup, layout, x, output_grad)
    expected = oracle.evaluate(
        replace(mla, cached=cached),
        weights,
        x.flatten(0, 1),
        output_grad.flatten(0, 1),
        layout.sequences,
        module_table(attention, mla, layout),
    )
    compare(named_tensors(mla, found), named_tensors(mla, expected), 1e-9).check()


def test_training_is_not_rounded_by_default():
    setup = Setup(latent_cache_dtype="fp8")
    attention, _ = layer(TINY, setup)
    plain, _ = layer(TINY, Setup())
    x = dense(TOKENS, BATCH).random_rows(TINY.hidden, 1).to(next(plain.parameters()).device)
    assert torch.equal(attention(x, None)[0], plain(x, None)[0])


class TestParityMode:
    @pytest.mark.parametrize(
        "dtype", [pytest.param(torch.float32, marks=needs.no_gpu), torch.bfloat16]
    )
    def test_training_prefill_and_decode_agree_to_the_bit(self, dtype):
        with batch_invariant_mode():
            assert differences(parity_model(dtype, options=FP8)) == []

    def test_without_the_option_they_differ(self):
        """Training then sees latents that were not rounded."""
        with batch_invariant_mode():
            model = parity_model(torch.bfloat16, options={"latent_cache_dtype": "fp8"})
            found = differences(model)
        assert "prefill" in found and "again" not in found


def test_memory_of_a_static_context():
    """48 bytes for each token: 24 values, a scale and 8 numbers of k_rope, in place of 64."""
    setup = Setup(dtype=torch.bfloat16, **FP8)
    attention, _ = layer(TINY, setup)
    context = StaticInferenceContext(BATCH, TOKENS)
    x = dense(TOKENS, BATCH).random_rows(TINY.hidden, 1).bfloat16()
    infer_in_steps(attention.eval(), setup, x, (TOKENS,), context)
    near, far = context.key_value_memory_dict[1]
    assert (near.nbytes, far.nbytes) == (TOKENS * BATCH * 48, 0)


class TestRefused:
    def test_names(self):
        with refusal("latent_cache_dtype must be one of model, fp8", "'fp4'"):
            AbsorbedMLAOptions(latent_cache_dtype="fp4")

    def test_training_on_latents_of_the_models_dtype(self):
        with refusal("train_on_cached_latents=True needs latent_cache_dtype='fp8'", "'model'"):
            AbsorbedMLAOptions(train_on_cached_latents=True)
        with refusal("train_on_cached_latents must be True or False", "'yes'"):
            AbsorbedMLAOptions(train_on_cached_latents="yes", latent_cache_dtype="fp8")

    def test_widths(self):
        with refusal("latent_cache_dtype='fp8'", "kv_lora_rank", "multiple of 4", "got 22"):
            build_attention(replace(TINY, kv_lora_rank=22), Setup(latent_cache_dtype="fp8"))

    def test_flash_mla(self):
        with refusal("paged_attention_backend='flash_mla'", "reads latents"):
            choose("flash_mla", REQUEST)


class TestChoice:
    """On an H200, where ``hopper`` reads FP8 rows of any block size, and on others."""

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(backend, "machine_name", lambda device: "NVIDIA H200")
        # It asks for the shared memory of a real device.
        monkeypatch.setattr(triton, "_why_not_shared_memory", lambda *_: None)

    @pytest.mark.parametrize(
        ("capability", "change", "taken"),
        [
            ((9, 0), {}, "hopper"),
            ((9, 0), {"block_size": 8}, "hopper"),
            ((9, 0), {"dtype": torch.float16, "num_heads": 128}, "hopper"),
            ((9, 0), {"kv_lora_rank": 64}, "triton"),
            ((8, 9), {}, "triton"),
        ],
    )
    def test_auto(self, capability, change, taken, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert choose("auto", replace(REQUEST, **change)).name == taken

    def test_by_name(self):
        assert choose("hopper", REQUEST).name == "hopper"
        plain = replace(REQUEST, latent_cache_dtype="model", block_size=8)
        with refusal("paged_attention_backend='hopper'", "multiple of 16"):
            choose("hopper", plain)
