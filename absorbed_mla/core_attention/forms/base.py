"""Interface of the two forms: how a query and a block of latents become attention.

Neither forward nor backward uses autograd. Keys may come in several blocks; ``attend`` visits them
one after the other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
from absorbed_mla.dims import MLADims

Query = tuple[Tensor, ...]
Weights = tuple[Tensor, ...]


class BlockGradients(NamedTuple):
    """Gradients from one block of keys: the query's in any dtype, the others' in the LSE's."""

    query: Query
    kv: Tensor
    weights: Weights


class Form(Protocol):
    """One execution of latent attention. Shape letters: see ``absorbed_mla.dims``."""

    def query(self, q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> Query:
        """The tensors to be multiplied with keys, the rope part rotated.

        Args:
            q: [q_nope | q_rope] [S, B, N * (nope + R)]; its memory may be reused.
            w_uk: [N, nope, C].
            cos: [S, R / 2], for the positions of the tokens.
            sin: Likewise.
        """
        ...

    def weights(self, w_uk: Tensor, w_uv: Tensor) -> Weights:
        """The up-projections that are applied inside of the attention."""
        ...

    def output(self, core_out: Tensor, w_uv: Tensor) -> Tensor:
        """[S, B, N, v], from the output of the attention."""
        ...

    def widths(self, dims: MLADims) -> tuple[int, int]:
        """Width of key and value."""
        ...

    def forward(
        self,
        query: Query,
        kv: Tensor,
        weights: Weights,
        backend: AttentionBackend,
        rules: ScoreRules,
    ) -> AttentionOutput:
        """Attention over a block [latent | k_rope], [S_k, B, C + R]."""
        ...

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        query: Query,
        kv: Tensor,
        weights: Weights,
        backend: AttentionBackend,
        rules: ScoreRules,
    ) -> BlockGradients:
        """Gradients from a block; ``output`` may be the attention over more keys than these."""
        ...
