"""Small GPT models with sparse attention, whose layers may share selections."""

from dataclasses import replace

import torch
from megatron.core.models.gpt import GPTModel

from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.oracle_dsa import OracleDSA
from tests.support import world
from tests.support.cases import config_for
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.models import gpt_model

# Layers 2 and 5 select, 3, 4 and 6 take what layer 2 or 5 has selected; layer 1 is alone.
SHARED = {"num_layers": 6, "dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 2}
DSA = replace(TINY_DSA, topk=3)


def fields(**changes) -> dict[str, object]:
    """Fields of the config of such a model at the parallel sizes of the moment."""
    return {
        **dsa_fields(DSA),
        "tensor_model_parallel_size": world.tp_size(),
        "dsa_indexer_loss_coeff": 0.5,
        "dsa_indexer_use_sparse_loss": True,
        **changes,
    }


def dsa_model(dtype: torch.dtype = torch.float64, **changes) -> GPTModel:
    changes = fields(**changes)
    config = config_for(DSA.mla, dtype, **changes)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
    return gpt_model(mla=DSA.mla, dtype=dtype, spec=spec, **changes)


def generating_fields(dsa: OracleDSA = DSA, **changes) -> dict[str, object]:
    """For ``engine.generating_model``: fewer keys are chosen than most tokens see."""
    sharing = {"num_layers": 4, "dsa_indexer_topk_freq": 2}
    return {"mla": dsa.mla, **dsa_fields(dsa), **sharing, **changes}
