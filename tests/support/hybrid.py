"""Small HybridModels, alone or with the weights of a GPTModel."""

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

from absorbed_mla.checkpoint.hybrid_names import MLA_SYMBOL, to_hybrid_state_dict
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.models import TOKENS, VOCAB


def hybrid_model(
    pattern: str = "+-",
    *,
    mla: OracleMLA = TINY,
    seed: int = 0,
    spec=None,
    dtype=torch.float32,
    **config_changes,
) -> HybridModel:
    """A model on this process's device; ``seed`` determines its weights.

    The pattern, in which ``+`` is MLA whatever its symbol is, says what a GPTModel's config has in
    ``num_layers``, ``moe_layer_freq`` and ``mtp_num_layers``, which are ignored.
    """
    pattern = pattern.replace("+", MLA_SYMBOL)
    main, *mtp = pattern.split("/")
    by_pattern = {
        "num_layers": len(main.replace("|", "")),
        "moe_layer_freq": 1,
        "mtp_num_layers": len(mtp) or None,
    }
    config = config_for(mla, dtype, **{**config_changes, **by_pattern})
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    model = HybridModel(
        config,
        spec or get_absorbed_mla_hybrid_stack_spec(config, backend="local"),
        VOCAB,
        TOKENS,
        hybrid_layer_pattern=pattern,
    )
    return model.to(world.device(), dtype)


def hybrid_twin(gpt: GPTModel, pattern: str, **config_changes) -> HybridModel:
    model = hybrid_model(pattern, seed=1, **config_changes)
    model.load_state_dict(to_hybrid_state_dict(gpt.state_dict()))
    return model
