"""A GPT model on a pack with shared prefixes: as if every sequence had its own copy of them."""

import types
from itertools import chain

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from torch import Tensor

from absorbed_mla.packed_router import use_packed_router
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.shared_prefix_log_probs import shared_prefix_log_probs
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.distributed.whole import of_all_ranks
from tests.support import needs, pipeline, world
from tests.support.auxiliary_losses import forget_auxiliary_losses
from tests.support.cases import TINY, config_for
from tests.support.combinations import few_ranks, thinned
from tests.support.dsa import dsa_fields
from tests.support.dsa_models import DSA
from tests.support.layouts import packed
from tests.support.models import MIXED, VOCAB, gpt_model
from tests.support.numerics import compare
from tests.support.refusal import refusal

EXPERTS = {
    **MIXED,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_router_dtype": "fp64",
    "cp_comm_type": "all_gather",
}
SPARSE = {**dsa_fields(DSA), "dsa_indexer_loss_coeff": 0.5, "num_layers": 1}
SPARSE["cp_comm_type"] = "allgather"
PER_TOKEN = {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    "experts": EXPERTS,
    "experts_recomputed": {**EXPERTS, **PER_TOKEN, **RECOMPUTED},
    "mtp": {"num_layers": 1, "mtp_num_layers": 2, "cp_comm_type": "p2p"},
    "mtp_experts": {**EXPERTS, "num_layers": 1, "moe_layer_freq": 1, "mtp_num_layers": 1},
    "mtp_per_token": {**SPARSE, "mtp_num_layers": 2, "calculate_per_token_loss": True},
}
STAGED_EXPERTS = {"experts": True, "packed_router": True}
# Fields and parts of a model of four layers that is cut into pipeline stages.
STAGES = {
    "dense": ({}, {}),
    "mtp_p2p": ({"cp_comm_type": "p2p"}, {"mtp_layers": 2}),
    "mtp_all_gather": ({"cp_comm_type": "all_gather"}, {"mtp_layers": 1}),
    "mtp_experts_all_gather": (
        {"cp_comm_type": "all_gather", "moe_router_dtype": "fp64"},
        {"mtp_layers": 1, **STAGED_EXPERTS},
    ),
    "mtp_experts_p2p": (
        {"cp_comm_type": "p2p", "moe_router_dtype": "fp64", **PER_TOKEN, **RECOMPUTED},
        {"mtp_layers": 2, **STAGED_EXPERTS},
    ),
    "mtp_sparse": ({**SPARSE, **PER_TOKEN, "num_layers": 4}, {"mla": DSA.mla, "mtp_layers": 2}),
}
# More ranks run the same code, but for MTP's means over them.
MEANS_ONLY = thinned() and world.size() > 2
# Of parameters with gradients of a tensor-parallel rank's tokens.
MARKS = ("sequence_parallel", "average_gradients_across_tp_domain")


@pytest.fixture
def in_fp64(monkeypatch):
    """Cross entropy, routing and quotients of numbers of tokens, which Megatron has in fp32."""

    def largest(logits):
        return logits.clone(), logits.max(-1)[0]

    monkeypatch.setattr(VocabParallelCrossEntropy, "calculate_logits_max", staticmethod(largest))
    of_torch = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    monkeypatch.setattr(moe_utils, "torch", of_torch)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def model(**fields):
    fields = {**world.tp_fields(), "context_parallel_size": world.cp_size(), **fields}
    mla = DSA.mla if "dsa_indexer_topk" in fields else TINY
    config = config_for(mla, torch.float64, **fields)
    block = get_absorbed_mla_decoder_block_spec(config, backend="local")
    use_packed_router(block)
    mtp = config.mtp_num_layers and get_absorbed_mla_mtp_block_spec(config, backend="local")
    if mtp:
        use_packed_router(mtp)
    forget_auxiliary_losses()
    return gpt_model(mla=mla, dtype=torch.float64, spec=block, mtp_block_spec=mtp, **fields).train()


def texts() -> list[list[int]]:
    """Two prompts with answers, the first one's of two kinds; every text divides over the ranks."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    prompt, thought, other = draw(7), draw(5), draw(6)
    of_thought = [[*prompt, *thought, *draw(count)] for count in (4, 8)]
    return [*of_thought, [*prompt, *draw(5)], *([*other, *draw(count)] for count in (2, 6))]


def gradients(gpt, log_probs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Of the weighted sum, over ranks that have a part of the tokens; and the log-probabilities."""
    one = torch.tensor(1.0, device=world.device())
    MoEAuxLossAutoScaler.set_loss_scale(one)
    # Megatron takes the mean of the ranks' means.
    ranks = 1 if gpt.config.calculate_per_token_loss else world.cp_size()
    MTPLossAutoScaler.set_loss_scale(one / ranks)
    gpt.zero_grad()
    (log_probs * weights).sum().backward()
    found = {"log_probs": log_probs.detach()}
    logged = MTPLossLoggingHelper.tracker.get("loss_values", one)
    found["mtp"] = world.all_reduce(logged, group=world.cp_group()) / world.cp_size()
    for name, parameter in gpt.named_parameters():
        if parameter.grad is not None:
            found[name] = world.all_reduce(parameter.grad, group=world.cp_group())
            if any(getattr(parameter, mark, False) for mark in MARKS):
                found[name] = world.all_reduce(found[name], group=world.tp_group())
    return found


def unshared_log_probs(gpt, labels: Tensor, given: list[list[int]], **more) -> Tensor:
    """Of labels of the pack without shared prefixes; 0 where they are negative."""
    tokens = torch.tensor([*chain(*given)], device=world.device())
    layout = packed([len(text) for text in given])
    positions = torch.cat([torch.arange(length) for length in layout.lengths]).to(tokens.device)
    params = layout.packed_seq_params(tokens.device)
    logits = gpt(tokens[None], positions[None], None, packed_seq_params=params, **more)
    losses = gpt.compute_language_model_loss(labels.clamp(min=0)[None], logits.transpose(0, 1))
    return -losses[0].masked_fill(labels < 0, 0.0)


def next_tokens(given: list[list[int]]) -> Tensor:
    """Of every token in its sequence; -1 for the last."""
    found = [[*text[1:], -1] for text in given]
    return torch.tensor([*chain(*found)], device=world.device())


@pytest.mark.parametrize("cp", [world.size()] if MEANS_ONLY else sorted({1, world.size()}))
@pytest.mark.parametrize("case", [name for name in CASES if "mtp" in name or not MEANS_ONLY])
def test_it_is_the_pack_without_shared_prefixes(in_fp64, case, cp):
    """Which is not cut: Megatron divides each rank's losses of MTP by the rank's own tokens."""
    generator, count = torch.Generator().manual_seed(1), sum(map(len, texts()))
    weights, loss_mask = torch.rand(2, count, generator=generator).to(world.device())
    case = CASES[case]
    if "num_moe_experts" in case:
        loss_mask = loss_mask / count  # Megatron divides by 1 at least.
    with world.parallel(tp=world.size() // cp):
        gpt = model(**case)
        found = unshared_log_probs(gpt, next_tokens(texts()), texts(), loss_mask=loss_mask[None])
        expected = gradients(gpt, found, weights)
    with world.parallel(tp=world.size() // cp, cp=cp):
        gpt = model(**case)
        tree, tokens = PrefixTree.from_token_ids(texts(), multiple=cp)
        assert len(tree.lengths) == 8 and len(tokens) < count
        tokens = tokens.to(world.device())
        found = shared_prefix_log_probs(gpt, tree, tokens, loss_mask=loss_mask)
        compare(gradients(gpt, found, weights), expected, 1e-12).check()


@needs.processes(2, 4)
@pytest.mark.parametrize("case", STAGES)
def test_pipeline_stages(in_fp64, case):
    """Microbatches of different lengths: losses and gradients are those of one whole model.

    Each of two stages has half of the ranks, which share a sequence.
    """
    fields, more = STAGES[case]
    fields = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", **fields}
    cut = pipeline.Model(dtype=torch.float64, fields=(*fields.items(),), **more)
    cp, per_token = world.size() // 2, "calculate_per_token_loss" in fields

    def loss(log_probs: Tensor):
        total = (log_probs * torch.arange(len(log_probs), device=log_probs.device).cos()).sum()
        tokens = [torch.tensor(1)] * per_token  # Else Megatron multiplies by the number of ranks.
        return total, *tokens, {"loss": total.item()}

    def shared(batches, gpt):
        tree, tokens = PrefixTree.from_token_ids(next(batches))
        return shared_prefix_log_probs(gpt, tree, tokens.to(world.device())), loss

    def unshared(batches, gpt):
        given = next(batches)
        return unshared_log_probs(gpt, next_tokens(given), given), loss

    def step(forward, **sizes):
        with world.parallel():
            whole = pipeline.whole_weights(cut)
        with world.parallel(**sizes):
            forget_auxiliary_losses()
            [gpt] = cut.build()
            pipeline.load([gpt], whole)
            losses = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter([texts()[:3], texts()[3:]]),
                model=gpt,
                num_microbatches=2,
                seq_length=1,
                micro_batch_size=1,
                forward_only=False,
            )
            found = {name: w.grad for name, w in pipeline.weights([gpt]).items()}
            if losses:  # the last stage's
                found["losses"] = torch.tensor([one["loss"] for one in losses])
            if "loss_values" in MTPLossLoggingHelper.tracker:
                found["mtp"] = MTPLossLoggingHelper.tracker["loss_values"]
            return found

    found = step(shared, cp=cp, pipeline_model_parallel_size=2)
    expected = step(unshared)
    assert set().union(*of_all_ranks(set(found))) == set(expected)
    for name, one in expected.items():
        # Of all stages that have a weight, as the first and the last have the embedding with MTP.
        found[name] = world.all_reduce(found.get(name, torch.zeros_like(one)))
        found[name] /= 1 if per_token and name not in ("losses", "mtp") else cp
    compare(found, expected, 1e-12).check()


@few_ranks
def test_labels():
    """Given ones: a token may have another in each sequence, or none."""
    gpt = model(num_layers=1)
    tree, tokens = PrefixTree.from_token_ids(texts())
    labels = torch.arange(len(tree.expand()), device=world.device()) % VOCAB - 9
    found = shared_prefix_log_probs(gpt, tree, tokens.to(world.device()), labels)
    torch.testing.assert_close(found, unshared_log_probs(gpt, labels, texts()))
    with refusal("labels must have a shape of", "got (3,)"):
        shared_prefix_log_probs(gpt, tree, tokens.to(world.device()), labels[:3])


@few_ranks
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_num_layers": 5}, "mtp_num_layers=5 needs prefixes of 7 tokens or more"),
        (
            {**EXPERTS, "moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor=None, got 1.0",
        ),
        ({"kind": "standard"}, "AbsorbedMLASelfAttention in every layer, got MLASelfAttention"),
    ],
)
def test_refused(fields, message):
    """Before work starts: what copies of a token would do differently."""
    given = {**world.tp_fields(), **fields}
    gpt = gpt_model(**given).train() if "kind" in fields else model(**fields)
    tree, tokens = PrefixTree.from_token_ids(texts())
    with refusal(message):
        shared_prefix_log_probs(gpt, tree, tokens.to(world.device()))
