"""Parity mode of whole models: a token's logits are the same bits however they are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.enums import AttnBackend

from absorbed_mla.batch_invariant import (
    batch_invariant_mode,
    collectives,
    disable_batch_invariant_mode,
    is_enabled,
    requirements,
)
from absorbed_mla.core_attention.backends import triton
from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.selection import choose_batch_invariant, invariant_name
from absorbed_mla.inference import backend as paged
from absorbed_mla.inference.paged_kernels import training_request
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.shared_prefix_log_probs import shared_prefix_log_probs
from tests.support import needs, world
from tests.support.backends import (
    attention_request,
    determinism,
    multiply_in_one_order,
    triton_interpreter,
)
from tests.support.cases import INTERPRETED, TINY, VARIANTS, WIDE, config_for
from tests.support.engine import Request, engine_of, generate
from tests.support.generation import prompts_of
from tests.support.layouts import TREES, packed, tree_layout
from tests.support.lora import with_random_lora
from tests.support.models import token_batch
from tests.support.numerics import compare
from tests.support.parity import (
    LAYERS,
    TREE,
    cached,
    differences,
    packed_alone,
    parity_model,
    shared_and_alone,
    tokens_of,
    trained,
)

# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.paged.forward
    import absorbed_mla.kernels.triton.forward  # noqa: F401

ENGINE = {"step_tokens": 64, "chunked_prefill": True}
FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}
layers = pytest.mark.parametrize("layers", LAYERS.values(), ids=list(LAYERS))
# On a GPU the kernels compute in bf16 and fp16.
fp32 = needs.no_gpu
dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=fp32), torch.bfloat16], ids=["fp32", "bf16"]
)


@pytest.fixture
def _on():
    with batch_invariant_mode():
        yield
    assert not is_enabled(world.device())


class TestBits:
    @layers
    @dtypes
    def test_every_way_gives_them(self, _on, dtype, layers):
        """Training forward, prefill, chunks and decode; alone and in a batch."""
        assert differences(parity_model(dtype, **layers)) == []

    @fp32
    @pytest.mark.parametrize("widths", [(1, 510, 64), (5, 23, 8)], ids=str)
    def test_of_odd_widths(self, _on, widths):
        """Rows of the attention's operands that fill no cache lines."""
        heads, c, rope = widths
        mla = replace(TINY, heads=heads, kv_lora_rank=c, rope=rope, hidden=16 * heads, nope=13)
        model = parity_model(torch.float32, mla=mla, **LAYERS["dense"])
        assert differences(model) == []

    @needs.gpu
    @layers
    @pytest.mark.parametrize("options", [{}, FP8], ids=["model", "fp8"])
    def test_of_widths_that_hopper_takes(self, _on, layers, options):
        """Training forward of its kernels, and theirs over a cache."""
        model = parity_model(torch.bfloat16, mla=WIDE, options=options, **layers)
        assert differences(model) == []
        tokens, lengths = tokens_of(1), (13, 1, 62)
        found = packed_alone(model, tokens, lengths)
        for part, logits in zip(tokens.split(lengths, 1), found.split(lengths, 1)):
            assert torch.equal(cached(model, part, [part.shape[1]]), logits)

    @needs.no_gpu
    @dtypes
    def test_they_depend_on_the_way_otherwise(self, dtype):
        """Without the mode: the comparison can fail, and decode is among what differs."""
        found = differences(parity_model(dtype, batch_invariant=False, **LAYERS["mixed"]))
        assert "again" not in found and {"decode", "decode, one row"} <= set(found)

    @needs.no_gpu  # whose kernels need other widths
    def test_of_gates_and_scaled_queries(self, _on):
        model = parity_model(torch.bfloat16, mla=VARIANTS["all_variants"], **LAYERS["dense"])
        assert differences(model) == []

    @dtypes
    def test_of_lora(self, _on, dtype):
        """Whose products nothing that generates adds in place."""
        model = with_random_lora(parity_model(dtype, **LAYERS["dense"]))
        assert differences(model) == []
        with batch_invariant_mode(tensor_parallel_parts=2), pytest.raises(ValueError, match="LoRA"):
            trained(model, tokens_of())

    @layers
    @dtypes
    def test_of_a_pack(self, _on, dtype, layers):
        """A sequence gives the same alone and behind others, and over a cache."""
        model, tokens, lengths = parity_model(dtype, **layers), tokens_of(1), (13, 1, 62)
        found = packed_alone(model, tokens, lengths)
        for part, logits in zip(tokens.split(lengths, 1), found.split(lengths, 1)):
            assert torch.equal(trained(model, part), logits)
            assert torch.equal(cached(model, part, [part.shape[1]]), logits)

    @layers
    @dtypes
    @pytest.mark.parametrize("tree", [name for name in TREES if "padded" not in name])
    def test_of_shared_prefixes(self, _on, dtype, layers, tree):
        """Of short ones, some empty; of long ones in ``differences``."""
        model, tree = parity_model(dtype, **layers), tree_layout(tree, 1).tree
        for found, expected in shared_and_alone(model, tree, tokens_of(1, tree.num_tokens)):
            assert torch.equal(found, expected)

    @needs.gpu
    def test_of_long_shared_prefixes(self, _on):
        """Of more keys than one softmax of the kernels for Hopper is over."""
        tree = PrefixTree((2101, 35, 70, 3, 130, 2049), (None, 0, 1, 1, 0, 4))
        model = parity_model(torch.bfloat16, mla=WIDE, **LAYERS["dense"])
        for found, expected in shared_and_alone(model, tree, tokens_of(1, tree.num_tokens)):
            assert torch.equal(found, expected)

    def log_probs(self, model, requests, run) -> list[list[float]]:
        """Of the tokens that were generated, by the training forward, as Megatron's engine has."""
        found = []
        for request, result in zip(requests, run.results):
            text = torch.tensor([[*request.prompt, *result.tokens]], device=world.device())
            chosen = slice(len(request.prompt) - 1, -1)
            values = trained(model, text)[0, chosen].float().log_softmax(-1)
            found.append(values.gather(1, text[0, chosen.start + 1 :, None])[:, 0].tolist())
        return found

    @dtypes
    def test_log_probs_of_the_engine(self, _on, dtype):
        """Megatron's dynamic engine: requests of mixed lengths together, chunked prefill."""
        model = parity_model(dtype, cache_mla_latents=True, **LAYERS["mixed"])
        requests = [Request(prompt, 6) for prompt in prompts_of((5, 70, 1, 33))]
        run = generate(engine_of(model, **ENGINE), requests, log_probs=True)
        assert run.statistics.chunks and run.statistics.mixed_steps
        expected = self.log_probs(model, requests, run)
        assert [result.log_probs for result in run.results] == expected

    def test_log_probs_with_prefix_cache(self, _on):
        model = parity_model(torch.bfloat16, cache_mla_latents=True, **LAYERS["mixed"])
        [long] = prompts_of((150,))
        requests = [Request(prompt, 3) for prompt in (long, long[:130], [*long[:70], 1, 2, 3])]
        with engine_of(model, prefix_caching=True, **ENGINE) as engine:
            first = generate(engine, requests[:1], log_probs=True)
            run = generate(engine, requests, log_probs=True)
        assert run.statistics.prefix_blocks and run.results[0] == first.results[0]
        expected = self.log_probs(model, requests, run)
        assert [result.log_probs for result in run.results] == expected
        texts = [[*one.prompt, *result.tokens] for one, result in zip(requests, run.results)]
        tree, tokens = PrefixTree.from_token_ids(texts)
        assert max(tree.depths) == 2
        found = shared_prefix_log_probs(model.train(), tree, tokens.to(world.device()))
        for one, values, log_probs in zip(requests, found.split(tree.sequence_lengths), expected):
            assert values[len(one.prompt) - 1 : -1].tolist() == log_probs


class TestTraining:
    def gradients(self, dtype=torch.float32, **arguments) -> dict[str, torch.Tensor]:
        model = parity_model(dtype, **LAYERS["mixed"], **arguments)
        tokens = token_batch(2)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        model(tokens, positions, None, labels=token_batch(6)).mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    @fp32
    def test_gradients_are_those_of_the_default_mode(self):
        """Within the rounding of fp32."""
        with batch_invariant_mode():
            found = self.gradients()
        for name, expected in self.gradients(batch_invariant=False).items():
            error = (found[name] - expected).norm() / expected.norm().clamp(min=1e-30)
            assert error < 2e-5, f"{name}: {error:.1e}"

    def of_prefixes(self, model, shared: bool) -> dict[str, torch.Tensor]:
        """Log-probabilities of a tree's sequences and gradients, on a pack with or without it."""
        tokens, model = tokens_of(1, TREE.num_tokens)[0], model.train()
        if shared:
            found = shared_prefix_log_probs(model, TREE, tokens)
        else:
            ids = tokens[TREE.expand().to(tokens.device)]
            params = packed(TREE.sequence_lengths).packed_seq_params(tokens.device)
            logits = model(ids[None], torch.zeros_like(ids)[None], None, packed_seq_params=params)
            wide = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
            found = wide.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
            # The last one of a sequence has no label.
            last = torch.tensor(TREE.sequence_lengths, device=ids.device).cumsum(0) - 1
            found = found.index_fill(0, last, 0.0)
        model.zero_grad()
        (found * torch.arange(len(found), device=found.device).cos()).sum().backward()
        return {"log_probs": found, **{n: p.grad.clone() for n, p in model.named_parameters()}}

    @pytest.mark.parametrize(
        ("kind", "dtype", "bound"),
        [
            pytest.param("dense", torch.float64, 1e-12, marks=needs.no_gpu),
            # Megatron computes some of the routing in fp32.
            pytest.param("mixed", torch.float64, 1e-7, marks=needs.no_gpu),
            ("dense", torch.bfloat16, 0.05),
        ],
    )
    def test_gradients_of_shared_prefixes(self, _on, kind, dtype, bound):
        """Summed over what shares a prefix; on a GPU by the kernels for Hopper."""
        mla = WIDE if torch.cuda.is_available() else None
        model = parity_model(dtype, mla=mla, moe_router_dtype="fp64", **LAYERS[kind])
        found, expected = (self.of_prefixes(model, shared) for shared in (True, False))
        assert torch.equal(found["log_probs"], expected["log_probs"])
        compare(found, expected, bound).check()

    def test_gradients_of_shared_prefixes_are_the_same_every_time(self, _on):
        model = parity_model(torch.bfloat16, **LAYERS["mixed"])
        first, again = (self.of_prefixes(model, True) for _ in range(2))
        assert all(torch.equal(again[name], first[name]) for name in first)

    def test_the_same_every_time_and_recomputed(self, _on):
        modules = ["mla_up_proj", "core_attn"]
        recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
        first = self.gradients(torch.bfloat16)
        for options in ({}, recompute):
            again = self.gradients(torch.bfloat16, **options)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_hosts_function_is_completed(monkeypatch):
    """Megatron's training script calls it, and it knows nothing of sums over ranks and topk."""
    monkeypatch.setattr(requirements, "is_enabled", lambda device: True)
    try:
        requirements.require_enabled(world.device(), config_for(TINY))
        assert mappings._reduce is collectives.reduce_by_tree
        scores = torch.tensor([1.0, 3.0, 2.0, 3.0], device=world.device())
        assert torch.topk(scores, 3, sorted=False).indices.tolist() == [1, 3, 2]
    finally:
        disable_batch_invariant_mode()


class TestChoice:
    """The backend of training and of a cache, whatever the cache holds."""

    CACHE = paged.PagedRequest(
        torch.device("cuda"), torch.bfloat16, 16, 512, 64, 64, batch_invariant=True
    )

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(paged, "machine_name", lambda device: "NVIDIA H200")
        # It asks for the shared memory of a real device.
        monkeypatch.setattr(triton, "_why_not_shared_memory", lambda *_: None)

    @pytest.mark.parametrize("held", ["model", "fp8"])
    @pytest.mark.parametrize(
        ("asked", "change", "capability", "name"),
        [
            ("auto", {}, (9, 0), "hopper"),
            ("auto", {"dtype": torch.float16}, (9, 0), "hopper"),
            ("auto", {"kv_lora_rank": 64}, (9, 0), "triton"),
            ("auto", {}, (8, 9), "triton"),
            ("hopper", {}, (9, 0), "hopper"),
            ("triton", {}, (9, 0), "triton"),
        ],
    )
    def test_on_gpus(self, held, asked, change, capability, name, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        options = AbsorbedMLAOptions(
            batch_invariant=True, core_attention_backend=asked, latent_cache_dtype=held
        )
        config = config_for(TINY, torch.bfloat16)
        options = requirements.settle_options(options, config, causal=True, tp_size=1)
        request = replace(self.CACHE, latent_cache_dtype=held, **change)
        training = training_request(request)
        assert invariant_name(options, training) == name
        trains = choose_batch_invariant(training, name, 1)
        assert trains.name == paged.choose(name, request).name == name
        assert isinstance(trains, InvariantHopper) == (name == "hopper")

    def test_hopper_by_name_where_it_cannot_run(self):
        request = training_request(replace(self.CACHE, kv_lora_rank=64, latent_cache_dtype="fp8"))
        message = r"batch_invariant=True cannot run here: hopper: widths 64 \(latent\)"
        with pytest.raises(ValueError, match=message):
            choose_batch_invariant(request, "hopper", 1)


class TestRefused:
    def test_without_the_mode(self):
        model = parity_model(torch.float32)
        with pytest.raises(ValueError, match=r"enable_batch_invariant_mode\(\) before the first"):
            trained(model, tokens_of(1))

    @pytest.mark.parametrize(
        "options, named",
        [
            ({"form": "expanded"}, "form='expanded'"),
            ({"core_attention_backend": "cudnn"}, "core_attention_backend='cudnn'"),
            ({"paged_attention_backend": "flash_mla"}, "paged_attention_backend='flash_mla'"),
            (
                {"core_attention_backend": "triton", "paged_attention_backend": "reference"},
                "differ",
            ),
        ],
    )
    def test_options_that_contradict_it(self, options, named):
        with pytest.raises(ValueError, match=f"batch_invariant=True .*{named}"):
            parity_model(torch.float32, options=options)

    @pytest.mark.parametrize(
        "config",
        [
            {"context_parallel_size": 2},
            {"moe_expert_capacity_factor": 1.0},
            {"moe_router_load_balancing_type": "sinkhorn"},
        ],
        ids=lambda config: next(iter(config)),
    )
    def test_config_that_contradicts_it(self, config):
        with pytest.raises(ValueError, match=f"batch_invariant=True .*{next(iter(config))}"):
            parity_model(torch.float32, **{**LAYERS["mixed"], **config})

    def test_layers_that_contradict_it(self):
        options = AbsorbedMLAOptions(batch_invariant=True)
        config = config_for(TINY, torch.bfloat16, transformer_impl="transformer_engine")
        with pytest.raises(ValueError, match=r"batch_invariant=True needs causal attention"):
            requirements.settle_options(options, config, causal=False, tp_size=1)
        with pytest.raises(ValueError, match=r"at most 2 tensor-parallel ranks, got 4"):
            requirements.settle_options(options, config, causal=True, tp_size=4)
        settled = requirements.settle_options(options, config, causal=True, tp_size=2)
        assert (settled.form, settled.core_attention_backend) == ("absorbed", "auto")

    @pytest.mark.parametrize(
        ("backend", "device", "key_blocks", "reason"),
        [
            ("reference", "cuda", 1, "on the CPU only"),
            ("reference", "cpu", 2, "no context parallelism"),
            ("hopper", "cpu", 1, "hopper: it needs a GPU"),
            ("triton", "cpu", 1, "triton: it needs a GPU"),
        ],
    )
    def test_where_no_backend_can(self, backend, device, key_blocks, reason):
        request = attention_request("absorbed", device=torch.device(device))
        with pytest.raises(ValueError, match=f"batch_invariant=True cannot run here.*{reason}"):
            choose_batch_invariant(request, backend, key_blocks)

    def test_experts_added_by_atomics(self, monkeypatch):
        monkeypatch.setattr(requirements, "is_enabled", lambda device: True)
        config = config_for(TINY, torch.bfloat16, num_moe_experts=6, moe_router_topk=4)
        message = "moe_router_topk=4 needs torch.use_deterministic_algorithms"
        with determinism(False), pytest.raises(ValueError, match=message):
            requirements.require_enabled(torch.device("cuda"), config)
        with determinism(True):
            assert not requirements._adds_experts_by_atomics(config)

    def test_mask_and_dropout(self, _on):
        tokens = tokens_of(1, 4)
        positions = torch.arange(4, device=tokens.device)[None]
        mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device=tokens.device)
        model = parity_model(torch.bfloat16)
        with pytest.raises(ValueError, match=r"batch_invariant=True .*attention_mask"):
            model(tokens, positions, mask)
        model = parity_model(torch.bfloat16, attention_dropout=0.1)
        with pytest.raises(ValueError, match=r"batch_invariant=True .*attention_dropout=0"):
            trained(model, tokens)


def test_the_hosts_switch_implies_it(_on, monkeypatch):
    """Megatron wants FlashAttention named, which this attention does not use."""
    for name in ("FLASH", "FUSED", "UNFUSED"):
        # Megatron stores the first model's choice in these variables.
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "")
        monkeypatch.delenv(f"NVTE_{name}_ATTN")
    model = parity_model(
        torch.bfloat16,
        batch_invariant=False,
        batch_invariant_mode=True,
        attention_backend=AttnBackend.flash,
        flash_attention_version=3,
        **LAYERS["dense"],
    )
    assert all(layer.self_attention.options.batch_invariant for layer in model.decoder.layers)
    assert differences(model) == []


@pytest.mark.no_cover
class TestTriton:
    """The kernels of training and of the paged cache, in Triton's interpreter without a GPU."""

    # More than one tile of keys.
    @pytest.mark.parametrize(
        ("dtype", "count"), [pytest.param(torch.float32, 18, marks=fp32), (torch.bfloat16, 66)]
    )
    def test_every_way_gives_them(self, _on, monkeypatch, dtype, count):
        multiply_in_one_order(monkeypatch)
        with triton_interpreter():
            options = {"core_attention_backend": "triton"}
            model = parity_model(dtype, mla=INTERPRETED, options=options)
            tokens = tokens_of(2, count)
            expected = trained(model, tokens)
            assert torch.equal(cached(model, tokens, [count]), expected)
            assert torch.equal(cached(model, tokens[1:], [count - 3, 2, 1]), expected[1:])
            tree = PrefixTree.of_groups([(count // 3, [count // 2, 3])])
            for found, alone in shared_and_alone(model, tree, tokens_of(1, tree.num_tokens)):
                assert torch.equal(found, alone)
