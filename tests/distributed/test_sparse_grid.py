"""The layer with DeepSeek Sparse Attention against its float64 oracle, straight from the spec.

Output, the indexer's reported loss, input gradient and every parameter's gradient at 1e-9. Mean
losses in the warm-up, sums in the sparse stage.
"""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.testing.indexer_recall import selection_recall
from tests.oracle_dsa import OracleLoss
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.dsa import VARIANTS
from tests.support.dsa_layer import check
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, cut_layout

# Tensor- and context-parallel sizes, and whether there is sequence parallelism.
SIZES = {
    2: [(2, 1, False), (2, 1, True), (1, 2, False)],
    4: [(2, 2, False), (2, 2, True), (1, 4, False), (4, 1, True)],
}.get(world.size(), [(1, 1, False)])
STAGES = {
    "warm_up": OracleLoss(coefficient=0.7, sparse=False),
    "sparse": OracleLoss(coefficient=0.7, sparse=True, per_token=True),
}
# Each alone: tests/unit/dsa/test_core_attention.py.
RECOMPUTE = {"none": (), "both": ("mla_up_proj", "core_attn")}


@needs.processes(1, 2, 4)
@grid(
    2,
    {
        "sizes": {f"tp{t}-cp{c}" + "-sp" * s: (t, c, s) for t, c, s in SIZES},
        "layout": LAYOUTS,
        "stage": STAGES,
        "recompute": RECOMPUTE,
    },
)
def test_grid(sizes, layout, stage, recompute):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    tp, cp, sequence_parallel = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, recompute=recompute, form="auto")
        cut = cut_layout(layout, max(cp, 2))
        check(VARIANTS["deepseek"], setup, cut, stage, **_cp(cp))


def _cp(size: int) -> dict[str, object]:
    """Megatron wants its strategy named."""
    return {"context_parallel_size": size, "cp_comm_type": "allgather"}


@needs.processes(2, 4)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "deepseek"])
@pytest.mark.parametrize("sizes", SIZES[1:3], ids=lambda s: f"tp{s[0]}-cp{s[1]}")
def test_variants(sizes, variant):
    """RoPE layouts, ReLU, Hadamard, no q_lora_rank, no rotary channels, top-k above the length."""
    tp, cp, sequence_parallel = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, form="auto")
        layout = cut_layout("thd_padded", max(cp, 2))
        check(VARIANTS[variant], setup, layout, STAGES["sparse"], **_cp(cp))


def test_recall_is_that_of_all_heads():
    """Of a selection: on every rank, as if it had all heads of the attention."""
    tokens, topk, heads, width, rope = 24, 3, 4 * world.tp_size(), 6, 2
    generator = torch.Generator().manual_seed(0)
    query, kv = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(world.device())
        for shape in ((tokens, 1, heads, width + rope), (tokens, 1, width + rope))
    )
    chosen = torch.arange(tokens)[:, None, None] - torch.arange(topk - 1, -1, -1)
    chosen = chosen.clamp(min=-1).int().to(world.device())
    spans = Spans(self_attention_spans(SequenceLayout.dense(tokens), causal=True))

    def recall(own: torch.Tensor, group=None):
        inputs = latent_inputs(own[..., :width], own[..., width:], kv)
        return selection_recall(chosen, inputs, spans, 0.5, tp_group=group)

    expected = recall(query)
    found = recall(world.own_part(query, dim=2), world.tp_group())
    assert found == expected and 0 < found.found < found.wanted
