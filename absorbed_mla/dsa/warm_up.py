"""The warm-up of indexers: a stage of training in which nothing else changes.

DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.1.
"""

from __future__ import annotations

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor, nn

from absorbed_mla.dsa.core_attention import SparseCoreAttention

# In the names of an indexer's parameters, and of nothing else.
INDEXER = ".indexer."


def train_only_indexer(model: nn.Module) -> None:
    """Freeze all that is no indexer, the biases that balance experts included.

    Indexers of recomputed layers learn, too: see :func:`require_embedding_gradient`.

    Args:
        model: This rank's part of it, before it is wrapped in Megatron's DistributedDataParallel.
    """
    train_only(model, INDEXER)


def train_only(model: nn.Module, part: str) -> None:
    """Freeze all parameters without ``part`` in their names, as :func:`train_only_indexer` does."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    for module in model.modules():
        if hasattr(module, "frozen_expert_bias"):
            module.frozen_expert_bias = True
    require_embedding_gradient(model)


def require_embedding_gradient(model: nn.Module) -> None:
    """Let the output of embeddings need a gradient, also while their weights are frozen.

    Megatron's recomputation gives the parameters of a layer a gradient only if the layer's input
    needs one.
    """
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding):
            module.register_forward_hook(_with_gradient)
        elif isinstance(module, SparseCoreAttention):
            module.input_needs_gradient = True


def _with_gradient(embedding: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output if output.requires_grad else output.detach().requires_grad_()
