"""Generation with sparse attention over ranks: greedy tokens of whole forwards and of one process.

If these fail, ranks cache or choose different keys. Tokens of transformers: test_sparse_logits.py.
"""

from dataclasses import replace

import pytest
import torch

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import batch_invariant_mode
from tests.distributed.engines import check_crowded
from tests.distributed.test_engine_pipeline import STAGES, check, model_of
from tests.support import needs, world
from tests.support.cases import INTERPRETED, TINY
from tests.support.combinations import two_ranks
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.dsa_models import DSA, generating_fields
from tests.support.engine import generating_model
from tests.support.parity import differences, parity_model


@two_ranks
@pytest.mark.parametrize(
    ("sequence_parallel", "cache"),
    [(False, "model"), pytest.param(True, "fp8", marks=needs.processes(2))],
)
def test_everything_at_once(sequence_parallel, cache):
    """Chunks, shared prefixes, preemption and the sizes of graphs; every rank schedules alike."""
    fields = generating_fields(sequence_parallel=sequence_parallel and world.tp_size() > 1)
    rounded = cache == "fp8"
    options = AbsorbedMLAOptions(latent_cache_dtype=cache, train_on_cached_latents=rounded)
    check_crowded(generating_model(options, **fields))


@needs.processes(2)
def test_parity():
    """Equal to the bit in training with SP, prefill and decode without."""
    dsa, dtype = DSA, torch.float32
    if torch.cuda.is_available():  # whose kernels need bf16, and other widths
        dsa, dtype = replace(DSA, mla=INTERPRETED, width=16), torch.bfloat16
    sizes = {"tensor_model_parallel_size": world.tp_size(), "sequence_parallel": True}
    with batch_invariant_mode():
        model = parity_model(dtype, mla=dsa.mla, num_layers=2, **dsa_fields(dsa), **sizes)
        assert differences(model) == []


@needs.processes(2)
@pytest.mark.parametrize("topk", [DSA.topk, 100])
def test_stages(topk):
    """Each stage has index keys of its own layers with an indexer: one of two."""
    assert TINY_DSA.mla is TINY
    fields = {**dsa_fields(TINY_DSA), "dsa_indexer_topk": topk, "dsa_indexer_topk_freq": 4}
    check(model_of(fields=fields), STAGES)
