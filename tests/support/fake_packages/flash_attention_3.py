"""Operators with the signatures of FlashAttention-3's, computing what they document in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.support.fake_packages import kit

NAMESPACE = "fake_flash_attn_3"
_START = (
    "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new{0}, Tensor(v_new!)? v_new{0}, "
    "Tensor? q_v{0}, Tensor(out!)? out{0}, Tensor? cu_seqlens_q{0}, Tensor? cu_seqlens_k{0}, "
    "Tensor? cu_seqlens_k_new{0}, Tensor? seqused_q{0}, Tensor? seqused_k{0}, "
    "int? max_seqlen_q{0}, int? max_seqlen_k{0}, Tensor? page_table{0}, Tensor? kv_batch_idx{0}, "
    "Tensor? leftpad_k{0}, Tensor? rotary_cos{0}, Tensor? rotary_sin{0}, "
    "Tensor? seqlens_rotary{0}, Tensor? q_descale{0}, Tensor? k_descale{0}, Tensor? v_descale{0}, "
)
# As registered by hopper/flash_api.cpp of flash-attention, and by vLLM's fork of it.
PACKAGE = (
    "fwd("
    + _START.format("=None")
    + "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
VLLM = (
    "fwd("
    + _START.format("").replace("Tensor q", "Tensor! q")
    + "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
# What turns features off that the attention does not use, as the packages' own Python has it.
_OFF = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class Calls:
    """How often the operator was called, and with what."""

    def __init__(self, schema: str) -> None:
        parsed = torch._C.parse_schema(schema)
        self.names = [argument.name for argument in parsed.arguments]
        self.defaults = {argument.name: argument.default_value for argument in parsed.arguments}
        self.number_of_results = len(parsed.returns)
        self.sequences: list[int] = []

    def forward(self, *given):
        """Attend, with boundaries as vLLM's build demands; what it does not write holds NaN."""
        # Last arguments that are what they are by default do not come.
        call = self.defaults | dict(zip(self.names, given))
        q, k, v, q_v, out = (call.pop(name) for name in ("q", "k", "v", "q_v", "out"))
        scale, causal = call.pop("softmax_scale"), call.pop("is_causal")
        lengths = [
            call.pop(f"{what}_{side}") for what in ("cu_seqlens", "seqused") for side in "qk"
        ]
        longest = [call.pop(f"max_seqlen_{side}") for side in "qk"]
        for name, value in call.items():
            assert value == _OFF.get(name) or name == "is_rotary_interleaved", name
        self._check(q, k, v, q_v, out, scale)
        lse = self._attend_all((q, k, v, q_v, out), scale, causal, lengths, longest)
        nothing = lse.new_empty(0)
        return (out, lse, nothing, nothing) if self.number_of_results > 1 else [out, lse, nothing]

    def _check(self, q: Tensor, k: Tensor, v: Tensor, q_v: Tensor, out: Tensor, scale) -> None:
        assert isinstance(scale, float)
        assert q.shape[-1] == k.shape[-1] <= 64, "qv wants narrow queries"
        assert q_v.shape == out.shape == (*q.shape[:-1], v.shape[-1])
        assert k.shape[:-1] == v.shape[:-1] and k.shape[-2] == 1
        assert out.dtype == q.dtype == k.dtype == v.dtype == q_v.dtype
        assert all(x.stride(-1) == 1 for x in (q, k, v, q_v, out))
        # TMA reads in units of 16 bytes.
        assert all(x.stride(-3) * x.element_size() % 16 == 0 for x in (q, k, v, q_v))

    def _attend_all(self, tensors, scale, causal, lengths, longest) -> Tensor:
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lengths)
        assert longest == [int(x.max()) for x in lengths[2:]]
        q, k, v, q_v, out = tensors
        lse = torch.full((q.shape[1], len(q)), torch.nan, device=q.device)
        parts = kit.sequences(*lengths)
        for rows, keys in parts:
            query, key = (torch.cat(x, -1) for x in ((q[rows], q_v[rows]), (k[keys], v[keys])))
            # Causal is aligned at the bottom right.
            offset = len(key) - len(query) if causal else None
            found, lse[:, rows] = kit.attend(query, key, v[keys], scale, offset)
            out[rows] = found.to(out)
        self.sequences.append(len(parts))
        return lse


@contextmanager
def registered(schema: str = PACKAGE, namespace: str = NAMESPACE) -> Iterator[Calls]:
    """The operator, as long as the context lasts."""
    calls = Calls(schema)
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl("fwd", calls.forward, device)
        yield calls
    finally:
        library._destroy()
