"""Parity mode with tensor_parallel_parts: the same bits at every tensor-parallel size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from absorbed_mla.batch_invariant import batch_invariant_mode
from tests.distributed.whole import whole_tensors
from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.models import whole_logits
from tests.support.parity import LAYERS, cached, chunkings, parity_model, tokens_of

PARTS = 8
MLA = replace(TINY, heads=8)
WIDTHS = {
    "dense": {**LAYERS["dense"], "ffn_hidden_size": 48},
    "mixed": {**LAYERS["mixed"], "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24},
}
pytestmark = needs.processes(2, 4, 8)


def step(layers, dtype, tp, sequence_parallel, mla=MLA, options=None, mtp=False, ways=("prefill", "halves", "decode"), groups=None, **more) -> dict[str, torch.Tensor]:
    with world.parallel(tp=tp, **(groups or {})):
        model = parity_model(
            dtype,
            mla=mla, options=options, mtp=mtp,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            **{**WIDTHS[layers], **more},
        )
        tokens = tokens_of(2, 24)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        found = {"logits": whole_logits(model.train(), tokens).detach()}
        for _ in range(2):
            loss = model(tokens, positions, None, labels=tokens.roll(-1, 1))
            loss.mean().backward()
        found["loss"] = loss.detach()
        named = []
        for name, p in model.named_parameters():
            g = p.grad
            for a in ("tensor_model_parallel", "partition_dim"):
                setattr(g, a, getattr(p, a, False))
            if name.endswith(("up_proj.weight",)) :
                g.tensor_model_parallel, g.partition_dim = True, 0
            named.append((name, g))
        found.update(whole_tensors(named))
        for name, sizes in chunkings(24).items():
            if name in ways:
                found[name] = cached(model, tokens, sizes)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", ["dense", "mixed"])
def test_bits(layers, dtype):
    with batch_invariant_mode(tensor_parallel_parts=PARTS):
        expected = step(layers, dtype, 1, False)
        sizes = [t for t in (2, 4, 8) if t <= world.size()]
        bad = {}
        for tp in sizes:
            for sp in (False, True) if layers == "dense" else (True,):
                found = step(layers, dtype, tp, sp)
                assert found.keys() == expected.keys()
                wrong = [n for n in found if not torch.equal(found[n], expected[n])]
                bad[tp, sp] = wrong
        for name in ("prefill", "halves", "decode"):
            assert torch.equal(expected[name], expected["logits"])
        assert not any(bad.values()), bad
