"""A GPT model on a pack with shared prefixes: as if every sequence had its own copy of them."""

import types
from itertools import chain

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
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
from tests.support.combinations import few_ranks
from tests.support.layouts import cut_tokens, packed
from tests.support.models import MIXED, VOCAB, gpt_model
from tests.support.numerics import compare
from tests.support.refusal import refusal

pytestmark = few_ranks

EXPERTS = {
    **MIXED,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_router_dtype": "fp64",
}
PER_TOKEN = {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    "dense": {"num_layers": 2},
    "experts": EXPERTS,
    "experts_recomputed": {**EXPERTS, **PER_TOKEN, **RECOMPUTED},
    "mtp": {"num_layers": 1, "mtp_num_layers": 2},
    "mtp_per_token": {"num_layers": 1, "mtp_num_layers": 1, "calculate_per_token_loss": True},
}


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
    config = config_for(TINY, torch.float64, **fields)
    block = get_absorbed_mla_decoder_block_spec(config, backend="local")
    use_packed_router(block)
    mtp = config.mtp_num_layers and get_absorbed_mla_mtp_block_spec(config, backend="local")
    forget_auxiliary_losses()
    return gpt_model(dtype=torch.float64, spec=block, mtp_block_spec=mtp, **fields).train()


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
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.set_loss_scale(torch.tensor(1.0, device=world.device()))
    gpt.zero_grad()
    (log_probs * weights).sum().backward()
    found = {"log_probs": log_probs.detach()}
    for name, parameter in gpt.named_parameters():
        if parameter.grad is not None:
            found[name] = world.all_reduce(parameter.grad, group=world.cp_group())
            if getattr(parameter, "sequence_parallel", False):
                found[name] = world.all_reduce(found[name], group=world.tp_group())
    return found


def unshared_log_probs(gpt, labels: Tensor, given: list[list[int]]) -> Tensor:
    """Of labels of the pack without shared prefixes, on every rank; 0 where they are negative."""
    tokens = torch.tensor([*chain(*given)], device=world.device())
    layout = packed([len(text) for text in given])
    own = cut_tokens(layout, world.cp_size(), world.cp_group().rank())
    positions = torch.cat([torch.arange(length) for length in layout.lengths]).to(tokens.device)
    params = layout.packed_seq_params(tokens.device)
    logits = gpt(tokens[None, own], positions[None, own], None, packed_seq_params=params)
    given = labels.clamp(min=0)[None, own]
    losses = gpt.compute_language_model_loss(given, logits.transpose(0, 1))[0]
    # Other context-parallel ranks have the other ones, and their gradients.
    found = losses.new_zeros(len(tokens)).index_copy(0, tokens.new_tensor(own), -losses)
    found = found + (world.all_reduce(found, group=world.cp_group()) - found.detach())
    return found.masked_fill(labels < 0, 0.0)


def next_tokens(given: list[list[int]]) -> Tensor:
    """Of every token in its sequence; -1 for the last."""
    found = [[*text[1:], -1] for text in given]
    return torch.tensor([*chain(*found)], device=world.device())


@pytest.mark.parametrize("cp", sorted({1, world.size()}))
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_pack_without_shared_prefixes(in_fp64, case, cp):
    with world.parallel(tp=world.size() // cp, cp=cp):
        gpt = model(**CASES[case])
        count = sum(map(len, texts()))
        weights = torch.randn(count, generator=torch.Generator().manual_seed(1))
        weights = weights.to(world.device())
        tree, tokens = PrefixTree.from_token_ids(texts())
        assert len(tree.lengths) == 8 and len(tokens) < count
        if "mtp" in case and cp > 1:
            with refusal("mtp_num_layers=", "context_parallel_size=1, got 2"):
                shared_prefix_log_probs(gpt, tree, tokens.to(world.device()))
            return
        expected = gradients(gpt, unshared_log_probs(gpt, next_tokens(texts()), texts()), weights)
        found = shared_prefix_log_probs(gpt, tree, tokens.to(world.device()))
        compare(gradients(gpt, found, weights), expected, 1e-12).check()


@needs.processes(2)
def test_pipeline_stages(in_fp64):
    """Microbatches of different lengths: losses and gradients are those of one whole model."""
    fields = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    cut = pipeline.Model(dtype=torch.float64, fields=(*fields.items(),))

    def loss(log_probs: Tensor):
        total = (log_probs * torch.arange(len(log_probs), device=log_probs.device).cos()).sum()
        return total, {"loss": total.item()}

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
            gradients = {name: w.grad for name, w in pipeline.weights([gpt]).items()}
            return torch.tensor([one["loss"] for one in losses]), gradients

    losses, found = step(shared, pipeline_model_parallel_size=2)
    expected_losses, expected = step(unshared)
    assert set().union(*of_all_ranks(set(found))) == set(expected)
    assert len(losses) == 2 * world.rank()  # those of the last stage
    expected |= {"losses": expected_losses if len(losses) else losses}
    compare(
        {**found, "losses": losses}, {n: expected[n] for n in (*found, "losses")}, 1e-12
    ).check()


def test_labels():
    """Given ones: a token may have another in each sequence, or none."""
    gpt = model(num_layers=1)
    tree, tokens = PrefixTree.from_token_ids(texts())
    labels = torch.arange(len(tree.expand()), device=world.device()) % VOCAB - 9
    found = shared_prefix_log_probs(gpt, tree, tokens.to(world.device()), labels)
    torch.testing.assert_close(found, unshared_log_probs(gpt, labels, texts()))
    with refusal("labels must have a shape of", "got (3,)"):
        shared_prefix_log_probs(gpt, tree, tokens.to(world.device()), labels[:3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_dropout": 0.1}, "need hidden_dropout=0, got 0.1"),
        ({"attention_dropout": 0.1}, "need attention_dropout=0, got 0.1"),
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
