"""What all implementations are started with; nothing but the standard library."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

# Tokens of a block of the cache, of ours and as it is asked of vLLM.
BLOCK = 64


@dataclass(frozen=True)
class Settings:
    """Of one model in one process, equal for all implementations."""

    model: str  # folder with the checkpoint
    device: str  # "cuda" or "cpu"
    max_model_len: int  # longest prompt and output together, in tokens
    max_num_seqs: int  # most requests of a step
    max_num_batched_tokens: int  # most tokens of a step, beside one of each of max_num_seqs
    cache_tokens: int  # that the latent cache holds
    token_bytes: int  # of one token in the cache, all layers
    sizes: tuple[int, ...]  # numbers of requests of the measured decode steps
    graphs: bool  # whether decode steps are captured as CUDA graphs

    @classmethod
    def read(cls, text: str) -> Settings:
        """The inverse of :meth:`text`."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(fields["sizes"])})

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step, which vLLM calls ``max_num_batched_tokens``."""
        return self.max_num_batched_tokens + self.max_num_seqs

    @property
    def captured(self) -> list[int]:
        """Numbers of tokens for which vLLM captures CUDA graphs: those measured and powers of 2."""
        powers = {2**power for power in range(self.max_num_seqs.bit_length())}
        return sorted(one for one in powers | set(self.sizes) if one <= self.max_num_seqs)
