"""Multi-token prediction in packs with padding: as if every document were alone."""

import torch
from torch import Tensor

from absorbed_mla.packed_roll import roll_tensor
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.hybrid import hybrid_model
from tests.support.layouts import cut_tokens, packed
from tests.support.numerics import compare
from tests.support.packed_mtp import PackedDocuments, documents, gradients, pack
from tests.support.pipeline import Model

# Parts of a chunk, whole chunks, a single token.
LENGTHS = (7, 1, 2, 9)
EXCHANGES = ("p2p", "all_gather") if world.size() > 1 else ("auto",)


def slots() -> list[int]:
    """Lengths with padding that context parallelism can cut; never without padding."""
    chunks = 2 * world.size()
    return [length + 1 + -(length + 1) % chunks for length in LENGTHS]


def model(kind: str, exchange: str = "auto"):
    fields = {"cp_comm_type": exchange}
    if kind == "hybrid":
        fields["context_parallel_size"] = world.cp_size()
        return hybrid_model("+-+-/+-", dtype=torch.float64, seed=3, **fields)
    torch.manual_seed(3)
    dense = {"num_layers": 2, **fields}
    return Model(mtp_layers=1, dtype=torch.float64, fields=tuple(dense.items())).build()[0]


def every_document_alone(kind: str) -> dict[str, Tensor]:
    texts = documents(LENGTHS)
    whole: PackedDocuments = pack(texts, LENGTHS)
    with world.parallel():
        gpt = model(kind)
        parts = [gradients(gpt, pack([text], [len(text) - 1]), whole.mtp_tokens) for text in texts]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@grid(2, {"kind": ["gpt", "hybrid"], "exchange": EXCHANGES})
def test_a_pack_is_its_documents(kind, exchange):
    expected = every_document_alone(kind)
    with world.parallel(cp=world.size()):
        found = gradients(model(kind, exchange), pack(documents(LENGTHS), slots()))
    # On a GPU the factor of MTP's loss was off by fp32's rounding.
    compare(found, expected, 1e-6 if needs.HAS_GPU else 1e-12).check()


def test_any_dtype_over_the_ranks():
    """Positions and labels are integers, a padding mask is bool, a loss mask has any dtype."""
    layout = packed(LENGTHS, slots())
    params = layout.packed_seq_params(world.device())
    ends = torch.tensor(layout.slots).cumsum(0) - torch.tensor(layout.slots)
    with world.parallel(cp=world.size()):
        group = world.cp_group()
        own = cut_tokens(layout, group.size(), group.rank())
        for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
            whole = (torch.arange(layout.tokens) % 5 + 1).to(dtype).expand(2, -1)
            expected = torch.zeros_like(whole)
            for start, length, slot in zip(ends.tolist(), LENGTHS, layout.slots):
                expected[:, start : start + length - 1] = whole[:, start + 1 : start + length]
                if dtype is torch.bool:
                    expected[:, start + length : start + slot] = True
            found, total = roll_tensor(
                whole[:, own].to(world.device()), cp_group=group, packed_seq_params=params
            )
            assert found.cpu().equal(expected[:, own]) and total == found.sum()
