"""Hypothesis looks for dimensions and sequence lengths at which the layer leaves the oracle.

Odd widths, one head, one channel, sequences of one token or none, padding anywhere, chunks shorter
and longer than sequences. One process, float64.
"""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.oracle import OracleMLA
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import Layout, dense, packed


@st.composite
def layers(draw) -> OracleMLA:
    heads = draw(st.integers(1, 5))
    return OracleMLA(
        hidden=heads * draw(st.integers(1, 5)),
        heads=heads,
        q_lora_rank=draw(st.none() | st.integers(1, 7)),
        kv_lora_rank=draw(st.integers(1, 11)),
        nope=draw(st.integers(1, 7)),
        rope=2 * draw(st.integers(0, 3)),
        v=draw(st.integers(1, 9)),
        latent_norm=draw(st.booleans()),
        norm_eps=1e-3,
        rope_type=draw(st.sampled_from(["rope", "yarn"])),
        rotary_base=100.0,
        scaling_factor=draw(st.sampled_from([1.0, 40.0])),
        original_context=64,
        mscale=draw(st.sampled_from([0.707, 1.0])),
        mscale_all_dim=draw(st.sampled_from([0.0, 1.0])),
    )


@st.composite
def packs(draw) -> Layout:
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any))
    if draw(st.booleans()):
        return packed(lengths)
    return packed(lengths, [length + draw(st.integers(0, 3)) for length in lengths])


layouts = packs() | st.builds(dense, tokens=st.integers(1, 9), batch=st.integers(1, 3))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    mla=layers(),
    layout=layouts,
    form=st.sampled_from(["absorbed", "expanded", "auto"]),
    chunk=st.integers(1, 10),
)
@example(mla=TINY, layout=packed((1, 1, 1)), form="absorbed", chunk=4)
@example(mla=TINY, layout=packed((0, 5, 0, 0, 1, 0)), form="expanded", chunk=2)
@example(mla=TINY, layout=packed((0, 3), (4, 5)), form="absorbed", chunk=1)
@example(mla=TINY, layout=dense(1, 1), form="expanded", chunk=1)
def test_any_shape_agrees_with_the_oracle(mla, layout, form, chunk):
    """A failure prints the smallest layer and layout at which the named tensor is wrong."""
    execute(mla, Setup(form=form, query_chunk_size=chunk), layout).check()
