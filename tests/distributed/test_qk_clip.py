"""The largest scores that QK-clip is made of, against the float64 oracle, and the clipped weights.

At TP = world size and under context parallelism; each rank has its own heads and its own tokens.
"""

import pytest
import torch
import torch.distributed as dist

from absorbed_mla.qk_clip import clip_qk
from benchmarks.kit.traffic import count_traffic
from tests import oracle
from tests.support import needs, world
from tests.support.cases import TINY, random_weights
from tests.support.combinations import grid
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    own_tokens,
    parameters_by_oracle_name,
    rank_weights,
    run,
)
from tests.support.layouts import LAYOUTS, cut_layout, grid_layout, tree_layout

FORM = ("absorbed", "expanded")
RECOMPUTE = {"none": (), "both": ("mla_up_proj", "core_attn")}
SIZES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(1, 4), (2, 2)]}.get(world.size(), [(1, 1)])
TAU = 2.5


def parts_of(weights, setup):
    """This rank's parts of whole weights, on its device."""
    return {n: w.to(world.device()) for n, w in rank_weights(setup, weights).items()}


def clipped(weights, max_logits, tau=TAU, alpha=0.5):
    """Whole weights after QK-clip: arXiv:2507.20534, section 2.1, in plain loops."""
    found = {name: w.clone() for name, w in weights.items()}
    width = TINY.nope + TINY.rope
    for head, largest in enumerate(max_logits.tolist()):
        gamma = min(1.0, tau / largest) if largest > 0 else 1.0
        query = found["w_uq"][head * width : (head + 1) * width]
        query[: TINY.nope] *= gamma**alpha
        query[TINY.nope :] *= gamma
        found["w_uk"][head * TINY.nope : (head + 1) * TINY.nope] *= gamma ** (1 - alpha)
    return found


@needs.processes(1, 2, 4)
@grid(
    2,
    {
        "sizes": {f"tp{tp}-cp{cp}": (tp, cp) for tp, cp in SIZES},
        "layout": (*LAYOUTS, "tree"),
        "form": FORM,
        "recompute": RECOMPUTE,
        "cp_comm_type": ("all_gather", "p2p"),
    },
)
def test_layouts(sizes, layout, form, recompute, cp_comm_type):
    """If this fails, other heads are clipped, or by other factors, than on one rank."""
    tp, cp = sizes
    setup = Setup(
        form=form,
        recompute=recompute,
        sequence_parallel=tp > 1,
        cp_comm_type=cp_comm_type,
    )
    with world.parallel(tp=tp, cp=cp):
        if layout == "tree":
            tokens = tree_layout("groups", 2 * cp)
        else:
            tokens = cut_layout(layout, cp) if cp > 1 else grid_layout(layout, divisible=tp > 1)
        attention = build_attention(TINY, setup, qk_clip=True)
        weights = random_weights(TINY)
        load_weights(attention, TINY, setup, weights)
        x, output_grad = (tokens.random_rows(TINY.hidden, seed) for seed in (1, 2))
        expected = expected_max_logits(attention, tokens, weights, x)
        # Half of the heads are clipped.
        attention.config.qk_clip_threshold = tau = float(expected.median()) * 1.001
        run(attention, TINY, setup, tokens, x, output_grad)
        check_own_heads(attention, expected)
        assert clip_qk(attention) == pytest.approx(float(own_heads(expected).max()), rel=1e-12)
        check_weights(attention, setup, weights, expected, tau)


def expected_max_logits(attention, tokens, weights, x):
    table = module_table(attention, TINY, tokens)
    rows = x.flatten(0, 1)
    return oracle.max_logits(TINY, weights, rows, tokens.sequences, table)


def own_heads(whole):
    return world.own_part(whole, 0)


def check_own_heads(attention, expected):
    """This rank's tokens give no more than the maximum, and all ranks' together give it."""
    found = attention.core_attention.current_max_attn_logits
    assert found.dtype == torch.float64 and not found.requires_grad
    found = world.all_reduce(found, dist.ReduceOp.MAX, world.cp_group())
    torch.testing.assert_close(found.cpu(), own_heads(expected), rtol=1e-9, atol=0)


def check_weights(attention, setup, weights, max_logits, tau):
    assert attention.core_attention.current_max_attn_logits is None
    expected = parts_of(clipped(weights, max_logits, tau), setup)
    before = parts_of(weights, setup)
    for name, parameter in parameters_by_oracle_name(attention, TINY).items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-9, atol=1e-12)
        # Rows of heads that are not clipped, and all other weights, keep their bits.
        same = expected[name] == before[name]
        assert torch.equal(parameter.detach()[same], before[name][same]), name
        changed = name in ("w_uq", "w_uk") and bool((own_heads(max_logits) > tau).any())
        assert changed == (not bool(same.all())), name


@needs.processes(2)
@pytest.mark.parametrize("owned", [[5, None], [None, 7], "half"], ids=str)
def test_shards_of_the_distributed_optimizer(owned):
    """fp32 values that a rank holds of a weight, wherever in a row they begin."""
    with world.parallel():  # two data-parallel ranks
        setup = Setup(dtype=torch.bfloat16)
        attention = build_attention(TINY, setup, qk_clip=True, qk_clip_threshold=TAU)
        weights = random_weights(TINY)
        load_weights(attention, TINY, setup, weights)
        masters = {}
        for name in ("w_uq", "w_uk"):
            weight = parameters_by_oracle_name(attention, TINY)[name]
            cut = weight.numel() // 2 + 3
            if owned != "half":
                cut = weight.numel() if owned[1] is None else 0
            begin, end = ((0, cut), (cut, weight.numel()))[dist.get_rank()]
            weight.main_param_sharded = True
            weight.main_param = None
            if begin < end:
                weight.main_param = weights[name].float().flatten()[begin:end].to(world.device())
            masters[name] = begin, end, weight
        max_logits = torch.arange(TINY.heads) + TAU - 0.5
        attention.core_attention.current_max_attn_logits = max_logits.to(world.device())
        attention.clip_qk()
        expected = clipped({n: w.float() for n, w in weights.items()}, max_logits)
        for name, (begin, end, weight) in masters.items():
            if begin < end:
                found = weight.main_param.cpu()
                torch.testing.assert_close(found, expected[name].flatten()[begin:end])
            rounded = expected[name].to(world.device())
            torch.testing.assert_close(weight.float(), rounded, rtol=2**-7, atol=1e-6)


def with_shards(attention):
    """bf16 weights, whose fp32 copies ranks hold a half of each; returns the weights."""
    weights = attention.qk_clip_weights()
    for weight in weights:
        cut = weight.numel() // 2 + 3
        part = (slice(0, cut), slice(cut, None))[dist.get_rank()]
        weight.main_param_sharded = True
        weight.main_param = weight.detach().float().flatten()[part].clone()
    return weights


def scores_above(attentions, tau, heads):
    for attention, above in zip(attentions, heads):
        found = torch.full((TINY.heads,), tau - 0.5, device=world.device())
        found[above] = tau + 1.0
        attention.core_attention.current_max_attn_logits = found


@needs.processes(2)
def test_ranks_ask_for_shards_once():
    """One collective a step; one more for all layers where a head is clipped and shards are new."""
    with world.parallel():
        setup = Setup(dtype=torch.bfloat16)
        config = {"qk_clip": True, "qk_clip_threshold": TAU}
        attentions = [build_attention(TINY, setup, **config) for _ in range(3)]
        model = torch.nn.ModuleList(attentions)
        weights = [weight for one in attentions for weight in with_shards(one)]

        def clip(*heads):
            scores_above(attentions, TAU, heads)
            before = [weight.detach().clone() for weight in weights]
            with count_traffic() as traffic:
                clip_qk(model)
            changed = [not torch.equal(w, b) for w, b in zip(weights, before)]
            assert changed == [bool(above) for above in heads for _ in range(2)]
            for weight in weights:
                check_shard(weight)
            return [message.operation for message in traffic.messages]

        nothing: list[int] = []
        alone, both = ["all-reduce"], ["all-reduce", "all-gather"]
        assert clip(nothing, nothing, nothing) == alone
        assert clip(nothing, [0, 2], nothing) == both
        assert clip([1], nothing, [3]) == alone
        # Another optimizer: only one rank can tell by what it holds.
        weight = weights[-1]
        if dist.get_rank():
            weight.main_param = weight.detach().float().flatten()
        else:
            weight.main_param = None
        assert clip([1], nothing, [0, 3]) == both


def check_shard(weight):
    """The fp32 values of this rank are those of its part of the weight, but for rounding."""
    if weight.main_param is not None:
        last = weight.main_param.numel()
        values = weight.detach().float().flatten()
        part = values[-last:] if dist.get_rank() else values[:last]
        torch.testing.assert_close(weight.main_param, part, rtol=2**-6, atol=1e-6)


@needs.processes(2)
def test_hidden_masters_are_refused():
    with world.parallel():
        attention = build_attention(TINY, Setup(), qk_clip=True, qk_clip_threshold=TAU)
        weight = attention.linear_q_up_proj.weight
        weight.main_param_sharded, weight.main_param = True, None
        before = weight.detach().clone()
        attention.core_attention.current_max_attn_logits = torch.full((TINY.heads,), 9.0)
        with pytest.raises(ValueError, match="use_precision_aware_optimizer hides them"):
            attention.clip_qk()
        assert torch.equal(weight, before)


@needs.processes(2)
def test_tokens_of_this_rank_only_until_reduced():
    """The maximum over context-parallel ranks is the group's, not this rank's."""
    with world.parallel(cp=2):
        attention = build_attention(TINY, Setup(), qk_clip=True, qk_clip_threshold=TAU)
        tokens = cut_layout("sbhd", 2)
        x = own_tokens(tokens.random_rows(TINY.hidden, 1), tokens, Setup(), world.cp_group())
        attention(x, None)
        found = attention.core_attention.current_max_attn_logits
        both = world.gather(found[None], 0, world.cp_group())
        assert not torch.equal(both[0], both[1])
