"""The two forms as one module, and the choice between them."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.flop_counter import FlopCounterMode

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.context_parallel.strategy import LocalKeys
from absorbed_mla.core_attention import module
from absorbed_mla.core_attention import selection as choice
from absorbed_mla.core_attention.cost import Work, operations, seconds
from absorbed_mla.core_attention.forms import absorbed, expanded
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.log_once import times_logged
from absorbed_mla.options import FORMS
from absorbed_mla.registry import ATTENTION_BACKENDS, PAGED_BACKENDS
from absorbed_mla.rope import RotaryTable
from absorbed_mla.sequences import SequenceLayout
from tests.support import world
from tests.support.backends import V3_DIMS, determinism
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention
from tests.support.numerics import relative_error

DIMS = MLADims.from_config(config_for(TINY), 1)
TOKENS, BATCH = 7, 2


def core(form: str) -> LatentCoreAttention:
    options = AbsorbedMLAOptions(form=form, query_chunk_size=3)
    return LatentCoreAttention(config_for(TINY), DIMS, AttnMaskType.causal, 0.2, options)


def operands() -> list[torch.Tensor]:
    n, nope, rope, v, c = TINY.heads, TINY.nope, TINY.rope, TINY.v, TINY.kv_lora_rank
    tokens = (TOKENS, BATCH)
    shapes = [(*tokens, n * (nope + rope)), (*tokens, c + rope)]
    shapes += [(n, nope, c), (n, v, c)]
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the tokens."""
    return RotaryTable(config_for(TINY)).cos_sin(TOKENS, world.device())


def attend(form: str, leaves) -> list[torch.Tensor]:
    """Output, LSE and all gradients."""
    module, layout = core(form), SequenceLayout.dense(TOKENS)
    keys = LocalKeys(layout, causal=True)
    plan = module.plan(keys, layout, 1, leaves[0], None)
    q, kv, w_uk, w_uv = leaves
    query = plan.form.query(q.clone(), w_uk, *table())
    out, lse = module(plan, query, keys.start(kv), w_uk, w_uv)
    assert out.shape == (TOKENS, BATCH, TINY.heads, TINY.v)
    loss = (out * torch.arange(out.numel(), device=out.device).view_as(out)).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def test_forms_agree(monkeypatch):
    """Without the functions of the other one, and in the LSE, which merging relies on."""
    leaves, found = operands(), []
    for form, other, name in (
        ("absorbed", expanded, "expand"),
        ("expanded", absorbed, "absorb_query"),
    ):
        monkeypatch.setattr(other, name, None)
        found.append(attend(form, leaves))
        monkeypatch.undo()
    assert all(relative_error(one, other) < 1e-13 for one, other in zip(*found, strict=True))


class TestAuto:
    def test_is_logged_once(self, caplog, monkeypatch):
        """And taken: the bits are those of the form that it names."""
        times_logged.cache_clear()
        x = torch.randn(90, 2, TINY.hidden, dtype=torch.float64, device=world.device())
        outputs = []
        with caplog.at_level(logging.INFO, logger=choice.logger.name):
            for form in ("auto", "auto", "expanded"):
                torch.manual_seed(0)
                outputs.append(build_attention(TINY, Setup(form=form))(x, None)[0])
        assert torch.equal(outputs[0], outputs[2])
        [record] = caplog.records
        said = record.getMessage()
        assert said.startswith("'auto' runs form=expanded with core_attention_backend=reference:")
        assert "cudnn (expanded): it" in said

    def test_is_made_once_for_each_layout(self, monkeypatch):
        """On CPUs too; backends, which try packages, are asked once for all layouts."""
        calls = {"candidates": 0, "fastest": 0}

        def counted(name):
            function = getattr(choice, name)

            def call(*args):
                calls[name] += 1
                return function(*args)

            return call

        for name in calls:
            monkeypatch.setattr(module, name, counted(name))
        layer = core("auto")

        def form_of(tokens: int) -> str:
            layout = SequenceLayout.dense(tokens)
            keys = LocalKeys(layout, causal=True)
            plan = layer.plan(keys, layout, 1, torch.empty(tokens, 1, 8), None)
            return type(plan.form).__name__

        assert [form_of(n) for n in (2, 90, 2, 90)] == ["AbsorbedForm", "ExpandedForm"] * 2
        assert calls == {"candidates": 1, "fastest": 2}
        with determinism(demanded=True):
            form_of(2)
        assert calls == {"candidates": 2, "fastest": 3}, "what may run depends on it"

    @pytest.mark.parametrize(
        ("heads", "tokens", "size", "sizes"),
        [
            (128, 8192, 2**20, [128]),
            (128, 33280, 2**20, [32] * 4),
            (128, 2**17, 2**20, [8] * 16),
            (40, 34000, 2**20, [20] * 2),
            (3, 10, 1, [1] * 3),
        ],
    )
    def test_heads_that_are_expanded_together(self, heads, tokens, size, sizes):
        """An eighth more memory, where that makes fewer pieces."""
        chunks = ExpandedForm(size)._head_chunks(torch.empty(heads), torch.empty(tokens, 1, 1))
        assert [chunk.stop - chunk.start for chunk in chunks] == sizes

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("form", ["absorbed", "expanded"])
    def test_operations_are_those_that_run(self, form, training):
        """Counted by PyTorch while the module runs, every query seeing every key."""
        options = AbsorbedMLAOptions(form=form, expansion_chunk_size=3 * TOKENS * BATCH)
        module = LatentCoreAttention(config_for(TINY), DIMS, AttnMaskType.no_mask, 0.2, options)
        module.train(training)
        layout, leaves = SequenceLayout.dense(TOKENS), operands()
        keys = LocalKeys(layout, causal=False)
        plan = module.plan(keys, layout, 1, leaves[0], None)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            query = plan.form.query(leaves[0].clone(), leaves[2], *table())
            out, _ = module(plan, query, *leaves[1:])
            if training:
                out.sum().backward()
        work = Work.of(layout, BATCH, 1, causal=False, training=training)
        assert counter.get_total_flops() == 2 * sum(operations(form, DIMS, work))

    @pytest.mark.parametrize("lengths", [(1,), (7,), (256, 1000, 3), (131072,), (1 << 20,)])
    @pytest.mark.parametrize("cp_size", [1, 2, 8, 64])
    @pytest.mark.parametrize("causal", [True, False])
    def test_work(self, lengths, cp_size, causal):
        """Pairs counted one by one, on the rank that holds the first and the last chunk."""
        lengths = [
            length if length % (2 * cp_size) == 0 else length * 2 * cp_size for length in lengths
        ]
        starts = [0, *itertools.accumulate(lengths)]
        layout = SequenceLayout(
            starts[-1], tuple(starts[:-1]), tuple(lengths), tuple(lengths), True
        )
        pairs = 0
        for length in lengths:
            queries, chunk = length // cp_size, length // (2 * cp_size)
            late = length - chunk
            if cp_size == 1:
                pairs += length * (length + 1) // 2 if causal else length * length
            elif causal:
                pairs += chunk * (chunk + 1) // 2 + chunk * late + chunk * (chunk + 1) // 2
            else:
                pairs += queries * length
        work = Work.of(layout, 1, cp_size, causal, training=True)
        assert work.query_tokens == sum(lengths) // cp_size
        assert work.key_tokens == sum(lengths)
        # The other ranks see as many; what is rounded is less than a pair for every query.
        assert abs(work.pairs - pairs) <= sum(lengths)

    def test_crossover_of_operations(self):
        """DeepSeek-V3, long sequences: expanding pays from 457 tokens per rank on."""
        for heads in (1, 16, 128):
            dims = replace(V3_DIMS, num_heads_per_rank=heads)
            for tokens, expected in ((384, "absorbed"), (450, "absorbed"), (465, "expanded")):
                work = Work.of(SequenceLayout.dense(tokens * 1024), 1, 1024, True, True)
                cost = {form: sum(operations(form, dims, work)) for form in FORMS[1:]}
                assert min(cost, key=cost.__getitem__) == expected

    @pytest.mark.parametrize("keys", [4096, 131072])
    @pytest.mark.parametrize("heads", [16, 128])
    def test_crossover_of_time(self, keys, heads):
        """Queries over keys that are latents already: absorbing pays for 150, not for 300."""
        dims = replace(V3_DIMS, num_heads_per_rank=heads)

        def fastest(queries: int) -> str:
            work = Work(queries, keys, queries * keys, training=False)
            ways = {"absorbed": "hopper", "expanded": "flash_attention_4"}
            entries = {form: ATTENTION_BACKENDS[name] for form, name in ways.items()}
            return min(ways, key=lambda f: seconds(f, entries[f], dims, work, "NVIDIA H200"))

        assert fastest(1) == fastest(150) == "absorbed"
        assert fastest(300) == fastest(keys) == "expanded"

    def test_every_backend_has_rates(self):
        for entry in (*ATTENTION_BACKENDS, *PAGED_BACKENDS):
            assert min(entry.rates["NVIDIA H200"]) > 0, entry.name
