"""Multi-token prediction (MTP) shifts tokens within documents, whatever padding is between."""

import pytest
import torch
from megatron.core.transformer import multi_token_prediction as host

from absorbed_mla import packed_roll
from absorbed_mla.packed_roll import roll_tensor
from absorbed_mla.standard_dsa import get_standard_dsa_decoder_block_spec
from absorbed_mla.standard_mla import (
    get_standard_mla_decoder_block_spec,
    get_standard_mla_layer_spec,
)
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from specs.absorbed_mla_layer_specs import (
    get_absorbed_mla_decoder_block_spec,
    get_absorbed_mla_layer_spec,
)
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support.cases import TINY, config_for
from tests.support.hybrid import hybrid_model
from tests.support.layouts import packed
from tests.support.numerics import compare
from tests.support.packed_mtp import documents, gradients, pack
from tests.support.pipeline import Model
from tests.support.refusal import refusal

CPU = torch.device("cpu")
# Lengths with padding of (3, 1, 0, 2), the last one ending without any.
SLOTS = (5, 2, 1, 2)


def roll(values: torch.Tensor, slots=SLOTS) -> torch.Tensor:
    return roll_tensor(values, packed_seq_params=packed((3, 1, 0, 2), slots).packed_seq_params(CPU))


def test_the_next_token_of_the_same_document():
    tokens = torch.arange(10, 20)[None]
    rolled, total = roll(tokens)
    assert rolled.tolist() == [[11, 12, 0, 0, 0, 0, 0, 0, 19, 0]] and total == 42
    assert tokens.tolist() == [[*range(10, 20)]]
    twice, _ = roll(rolled)
    assert twice.tolist() == [[12, 0, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_padding_counts_no_token_even_without_a_loss_mask():
    """Where a program gives no loss mask, Megatron makes one of ones."""
    assert roll(torch.ones(1, 10, dtype=torch.float64))[1] == 3


def test_padding_stays_padding():
    """The last token of a document is a token for the experts' balance, as in Megatron's MTP."""
    mask = torch.tensor([[False, False, False, True, True, False, True, True, False, False]])
    assert roll(mask)[0].equal(mask)


def test_without_padding_it_is_megatrons():
    pack = packed((3, 1, 6)).packed_seq_params(CPU)
    tokens, same = torch.arange(10, 30).reshape(2, 10), packed((3, 1, 6), (3, 1, 6))
    theirs = packed_roll._megatrons_roll(tokens, packed_seq_params=pack)
    ours = roll_tensor(tokens, packed_seq_params=same.packed_seq_params(CPU))
    for found in (ours, roll_tensor(tokens, packed_seq_params=pack)):
        assert all(map(torch.equal, found, theirs))
    assert roll_tensor(None) == (None, None)
    assert roll_tensor(tokens)[0].tolist()[0] == [*range(11, 20), 0]


def test_boundaries_that_do_not_fit():
    with refusal("cu_seqlens_q_padded", "10", "11", "packed_roll, which replaces Megatron's"):
        roll(torch.arange(11))


def test_two_depths():
    """Each depth shifts what the one before has shifted; positions and labels as well as tokens."""
    lengths = (7, 1, 2, 4)
    model = Model(mtp_layers=2, dtype=torch.float64).build()[0]
    found = [gradients(model, pack(documents(lengths), slots)) for slots in (lengths, (8, 3, 2, 9))]
    compare(found[1], found[0], 1e-12).check()


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (get_absorbed_mla_layer_spec, {"backend": "local"}),
        (get_absorbed_mla_decoder_block_spec, {"backend": "local"}),
        (get_absorbed_mla_mtp_block_spec, {"backend": "local"}),
        (get_absorbed_mla_hybrid_stack_spec, {"backend": "local"}),
        (get_standard_mla_layer_spec, {}),
        (get_standard_mla_decoder_block_spec, {}),
        (get_standard_dsa_decoder_block_spec, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_spec_brings_it(spec, fields, monkeypatch):
    """Also a decoder's: the last pipeline stage may have the loss of MTP without its layers.

    Standard models are compared with ours, and must not depend on what was imported before.
    """
    monkeypatch.setattr(host, "roll_tensor", packed_roll._megatrons_roll)
    config = config_for(TINY, transformer_impl="local", mtp_num_layers=1)
    if spec is get_standard_dsa_decoder_block_spec:
        config.experimental_attention_variant = "dsa"
    spec(config, **fields)
    assert host.roll_tensor is roll_tensor


def test_a_megatron_without_it(monkeypatch):
    """Models without MTP do not need it."""
    monkeypatch.delattr(host, "roll_tensor")
    get_absorbed_mla_decoder_block_spec(config_for(TINY), backend="local")
    hybrid_model("+-")
    with refusal("mtp_num_layers", "roll_tensor"):
        get_absorbed_mla_mtp_block_spec(config_for(TINY, mtp_num_layers=1), backend="local")
    with refusal("mtp_num_layers", "roll_tensor"):
        hybrid_model("+-/+-")
