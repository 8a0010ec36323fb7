"""Logits of the same tokens from training, prefill and decode, in many ways to split them."""

import random
from collections.abc import Iterator, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.megatron_buffers import drop_inference_buffers
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.prefix_tree import PrefixTree
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import INTERPRETED, TINY, config_for, model_options
from tests.support.generation import without_sequence_parallelism
from tests.support.layouts import packed
from tests.support.models import MIXED, VOCAB, gpt_model, whole_logits

# Widths at which vector loops leave something over.
LAYERS: dict[str, dict] = {
    "dense": {"num_layers": 2, "ffn_hidden_size": 44},
    "mixed": {
        **MIXED,
        "softmax_type": "learnable",
        "ffn_hidden_size": 44,
        "moe_ffn_hidden_size": 20,
        # More than two scores are added up.
        "num_moe_experts": 6,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "activation_func": torch.nn.functional.silu,
    },
}
# More than one tile of keys.
TOKENS, BATCH = 76, 2
# Nodes at three depths and padding between and behind them. Tensor-parallel ranks can divide the
# tokens of the pack and of each sequence.
TREE = PrefixTree(
    (37, 19, 20, 4, 5, 11, 3),
    (None, 0, 1, 1, None, 4, 4),
    padded_lengths=(37, 22, 20, 4, 5, 11, 5),
)


def parity_model(
    dtype: torch.dtype,
    *,
    batch_invariant: bool = True,
    mla: OracleMLA | None = None,
    options: dict | None = None,
    mtp: bool = False,
    **config,
) -> GPTModel:
    """A model whose logits depend strongly on the attention."""
    # The kernels for GPUs need other widths.
    mla = mla or (INTERPRETED if torch.cuda.is_available() else TINY)
    options = AbsorbedMLAOptions(
        batch_invariant=batch_invariant, **(model_options(mla) | (options or {}))
    )
    config = {"init_method_std": 0.3, **config}
    spec = get_absorbed_mla_decoder_block_spec(
        config_for(mla, dtype, **config), backend="local", options=options
    )
    drafting = None
    if mtp:
        config |= {"mtp_num_layers": 1}
        drafting = get_absorbed_mla_mtp_block_spec(
            config_for(mla, dtype, **config), backend="local", options=options
        )
    return gpt_model(mla=mla, dtype=dtype, spec=spec, mtp_block_spec=drafting, **config)


def tokens_of(batch: int = BATCH, count: int = TOKENS) -> Tensor:
    """Random token ids [batch, count]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (batch, count), generator=generator).to(world.device())


def trained(model: GPTModel, tokens: Tensor, **arguments) -> Tensor:
    """Whole logits [B, S, VOCAB] of the training forward."""
    return whole_logits(model.train(), tokens, **arguments).detach()


def packed_alone(model: GPTModel, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """The training forward of one row [1, S] that is a pack of sequences of these lengths."""
    layout = packed(lengths)
    return trained(model, tokens, packed_seq_params=layout.packed_seq_params(tokens.device))


@torch.inference_mode()
def cached(model: GPTModel, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
    """Whole logits over a cache of latents, ``sizes`` tokens of every row at a time."""
    model.eval()
    context = StaticInferenceContext(len(tokens), tokens.shape[1] + 3)
    context.config.materialize_only_last_token_logits = False
    found = []
    with without_sequence_parallelism(model):
        for part in tokens.split(list(sizes), dim=1):
            done = context.sequence_len_offset
            found.append(whole_logits(model, part, done, inference_context=context))
            context.sequence_len_offset += part.shape[1]
    drop_inference_buffers()
    return torch.cat(found, dim=1)


def shared_and_alone(
    model: GPTModel, tree: PrefixTree, tokens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of each sequence in a pack [1, S] with shared prefixes, and by a forward of it."""
    params = tree.packed_seq_params(tokens.device)
    found = trained(model, tokens, packed_seq_params=params)
    for rows in tree.expand().split(tree.sequence_lengths):
        yield found[:, rows], trained(model, tokens[:, rows])


def chunkings(count: int = TOKENS) -> dict[str, list[int]]:
    """Ways to split ``count`` tokens into forwards, by name."""
    rng = random.Random(1)
    ways = {"prefill": [count], "halves": [count // 2, count - count // 2]}
    ways["random"] = []
    while left := count - sum(ways["random"]):
        ways["random"].append(min(left, rng.choice([1, 2, 3, 5, 17, 33])))
    ways["decode"] = [count - 5] + [1] * 5
    return ways


def differences(model: GPTModel) -> list[str]:
    """Names of the ways whose logits differ in a bit from a training forward of the whole batch."""
    tokens = tokens_of()
    expected = trained(model, tokens)
    ways = {
        "again": (trained(model, tokens), expected),
        "one row": (trained(model, tokens[1:2]), expected[1:2]),
        "shorter": (trained(model, tokens[:, :72]), expected[:, :72]),
        "another batch": (trained(model, tokens.flip(0)), expected.flip(0)),
    }
    for name, sizes in chunkings().items():
        ways[name] = (cached(model, tokens, sizes), expected)
        ways[f"{name}, one row"] = (cached(model, tokens[1:], sizes), expected[1:])
    for i, pair in enumerate(shared_and_alone(model, TREE, tokens_of(1, TREE.num_tokens))):
        ways[f"shared prefixes, sequence {i}"] = pair
    for name, (found, wanted) in ways.items():
        places = (found != wanted).any(-1).nonzero().tolist()
        if places:  # shown where a test fails
            print(f"{name}: other logits at [row, position] {places[:9]}, {len(places)} in all")
    return [name for name, (found, wanted) in ways.items() if not torch.equal(found, wanted)]
