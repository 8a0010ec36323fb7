"""Multi-head latent attention in float64 on one process, from the papers' equations.

The ground truth of the tests. It shares no code with the package or with Megatron: weights are
whole tensors, every sequence is attended on its own with a dense softmax, and gradients are
autograd's. DeepSeek-V2 (arXiv:2405.04434) section 2.1 and appendix C give the attention, RoFormer
(arXiv:2104.09864) the rotation and YaRN (arXiv:2309.00071) its extension to longer contexts.

Shape letters:

    R  rows: all tokens of a batch or pack, padding included
    S  tokens of one sequence
    H  attention heads
    C  kv_lora_rank
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class OracleMLA:
    """Dimensions and constants of one MLA layer.

    Weights are a dict of [out, in] matrices, rows of H heads head by head:

        w_q    [H * (nope + rope), hidden]     if q_lora_rank is None, else
        w_dq   [q_lora_rank, hidden],  w_uq [H * (nope + rope), q_lora_rank]
        w_dkv  [C + rope, hidden]              latent rows, then the rows of the rotary key
        w_uk   [H * nope, C],  w_uv [H * v, C],  w_o [hidden, H * v]
        q_norm [q_lora_rank],  kv_norm [C]     if latent_norm; q_norm only with q_lora_rank
        sinks  [H]                             if sinks
        k_rope_norm [rope]                     if k_rope_norm
        w_gate [H, hidden] or [H * v, hidden]  if gate is "headwise" or "elementwise"

    LoRA (arXiv:2106.09685) gives a matrix W two more, W.A [r, in] and W.B [out, r]: the layer
    multiplies by W + lora_scale W.B W.A.
    """

    hidden: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    latent_norm: bool = True
    # A score of each head that every token has beside those of keys, with value 0.
    sinks: bool = False
    # Tokens that a token sees at most, itself included.
    window: int | None = None
    norm_eps: float = 1e-6
    rope_type: str = "rope"
    rotary_base: float = 10000.0
    scaling_factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    # Peculiarities of some models.
    gate: str | None = None
    k_rope_norm: bool = False
    rotated: bool = True
    query_scaling_beta: float | None = None
    # Applied to the keys' latents [S, C] and rotated k_rope [S, rope]: what a cache makes of them.
    cached: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    # Of the matrices that have LoRA.
    lora: tuple[str, ...] = ()
    lora_rank: int = 3
    lora_scale: float = 1.5

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight."""
        query_rows = self.heads * (self.nope + self.rope)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_lora_rank is None:
            shapes["w_q"] = (query_rows, self.hidden)
        else:
            shapes["w_dq"] = (self.q_lora_rank, self.hidden)
            shapes["w_uq"] = (query_rows, self.q_lora_rank)
        shapes["w_dkv"] = (self.kv_lora_rank + self.rope, self.hidden)
        shapes["w_uk"] = (self.heads * self.nope, self.kv_lora_rank)
        shapes["w_uv"] = (self.heads * self.v, self.kv_lora_rank)
        shapes["w_o"] = (self.hidden, self.heads * self.v)
        if self.latent_norm:
            shapes["kv_norm"] = (self.kv_lora_rank,)
            if self.q_lora_rank is not None:
                shapes["q_norm"] = (self.q_lora_rank,)
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        if self.k_rope_norm:
            shapes["k_rope_norm"] = (self.rope,)
        if self.gate:
            gates = {"headwise": 1, "elementwise": self.v}[self.gate]
            shapes["w_gate"] = (self.heads * gates, self.hidden)
        for name in self.lora:
            rows, columns = shapes[name]
            shapes |= {f"{name}.A": (self.lora_rank, columns), f"{name}.B": (rows, self.lora_rank)}
        return shapes

    def updated(self, w: dict[str, Tensor]) -> dict[str, Tensor]:
        """The matrices that the layer multiplies by."""
        updates = {n: self.lora_scale * w[f"{n}.B"] @ w[f"{n}.A"] for n in self.lora}
        return w | {name: w[name] + update for name, update in updates.items()}

    def softmax_scale(self) -> float:
        """YaRN's temperature, squared, over the root of the unabsorbed head dim."""
        temperature = yarn_temperature(self.scaling_factor, self.mscale_all_dim)
        return temperature**2 / math.sqrt(self.nope + self.rope)

    def rotary_table(self, positions: int) -> Table:
        """Cosines and sines [positions, rope / 2], float64."""
        if self.rope_type == "yarn":
            frequencies = yarn_frequencies(self)
            magnitude = yarn_temperature(self.scaling_factor, self.mscale) / yarn_temperature(
                self.scaling_factor, self.mscale_all_dim
            )
        else:
            frequencies = rope_frequencies(self.rope, self.rotary_base)
            magnitude = 1.0
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        return magnitude * torch.cos(angles), magnitude * torch.sin(angles)


def rope_frequencies(rope: int, base: float) -> Tensor:
    """theta_i = base^(-2 i / rope), float64 [rope / 2]."""
    return torch.tensor([base ** (-2 * i / rope) for i in range(rope // 2)], dtype=torch.float64)


def yarn_temperature(factor: float, mscale: float) -> float:
    """sqrt(1/t) = 0.1 mscale ln(factor) + 1, and 1 for contexts that are not extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_ramp_ends(mla: OracleMLA) -> tuple[int, int]:
    """Channel pairs between which YaRN goes from untouched to fully interpolated frequencies.

    Pair i turns original_context * theta_i / (2 pi) times within the original context; solved for
    i at beta_fast and beta_slow turns and rounded outwards.
    """

    def pair_turning(times: float) -> float:
        wavelength_ratio = mla.original_context / (2 * math.pi * times)
        return mla.rope / 2 * math.log(wavelength_ratio) / math.log(mla.rotary_base)

    first = max(math.floor(pair_turning(mla.beta_fast)), 0)
    last = min(math.ceil(pair_turning(mla.beta_slow)), mla.rope - 1)
    return first, last


def yarn_frequencies(mla: OracleMLA) -> Tensor:
    """h(theta_i) = (1 - gamma_i) theta_i / factor + gamma_i theta_i, float64 [rope / 2]."""
    first, last = yarn_ramp_ends(mla)
    # The released implementations widen an empty ramp by 0.001 instead of dividing by zero.
    width = last - first if last != first else 0.001
    blended = []
    for i, theta in enumerate(rope_frequencies(mla.rope, mla.rotary_base).tolist()):
        gamma = 1.0 - min(max((i - first) / width, 0.0), 1.0)
        blended.append((1.0 - gamma) * theta / mla.scaling_factor + gamma * theta)
    return torch.tensor(blended, dtype=torch.float64)


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of a batch or pack.

    Attributes:
        rows: int64 [S], where its tokens are; token i has position i.
        visible: bool [S, S], True where the query of that row attends the key of that column.
    """

    rows: Tensor
    visible: Tensor


def causal(length: int) -> Tensor:
    """Every token sees itself and what precedes it: bool [length, length]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def batch(length: int, batch_size: int, visible: Tensor | None = None) -> list[TokenSequence]:
    """Sequences of a [length, batch_size, hidden] batch; ``visible`` [batch, S, S] or causal."""
    if visible is None:
        visible = causal(length).expand(batch_size, length, length)
    rows = torch.arange(length * batch_size).view(length, batch_size)
    return [TokenSequence(rows[:, b], visible[b]) for b in range(batch_size)]


def pack(lengths: Sequence[int], slots: Sequence[int] | None = None) -> list[TokenSequence]:
    """Causal sequences one after the other; each begins a slot of its own (longer if padded)."""
    sequences, start = [], 0
    for length, slot in zip(lengths, slots or lengths, strict=True):
        sequences.append(TokenSequence(torch.arange(start, start + length), causal(length)))
        start += slot
    return sequences


def at_least_float32(x: Tensor) -> Tensor:
    """Norms, rotation and softmax are evaluated in no less than float32 at any precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dim."""
    wide = at_least_float32(x)
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt(mean_square + eps) * at_least_float32(gain)).to(x.dtype)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Multiply channel pairs (0, 1), (2, 3), ... as complex numbers by cos + i sin.

    ``x`` is [S, H, rope], the table's tensors [S, rope / 2] or longer; pairs stay neighbours.
    """
    wide = at_least_float32(x)
    cos, sin = (t[: len(x), None].to(wide.dtype) for t in table)
    real, imaginary = wide[..., 0::2], wide[..., 1::2]
    rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)


def project_query(mla: OracleMLA, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """[S, hidden] -> [S, H, nope + rope]."""
    if mla.q_lora_rank is None:
        query = x @ w["w_q"].T
    else:
        compressed = x @ w["w_dq"].T
        if mla.latent_norm:
            compressed = rms_norm(compressed, w["q_norm"], mla.norm_eps)
        query = compressed @ w["w_uq"].T
    return query.view(len(x), mla.heads, mla.nope + mla.rope)


def scores_and_values(
    mla: OracleMLA, w: dict[str, Tensor], x: Tensor, table: Table
) -> tuple[Tensor, Tensor]:
    """Scaled scores [H, S, S] of one sequence [S, hidden], and values [S, H, v]."""
    length = len(x)
    q_nope, q_rope = project_query(mla, w, x).split([mla.nope, mla.rope], dim=-1)
    latent, k_rope = (x @ w["w_dkv"].T).split([mla.kv_lora_rank, mla.rope], dim=-1)
    if mla.latent_norm:
        latent = rms_norm(latent, w["kv_norm"], mla.norm_eps)
    if mla.k_rope_norm:
        k_rope = rms_norm(k_rope, w["k_rope_norm"], mla.norm_eps)
    if mla.rope and mla.rotated:
        q_rope = rotate(q_rope, table)
        k_rope = rotate(k_rope[:, None], table)[:, 0]
    if mla.cached is not None:
        latent, k_rope = mla.cached(latent, k_rope)
    k_nope = (latent @ w["w_uk"].T).view(length, mla.heads, mla.nope)
    value = (latent @ w["w_uv"].T).view(length, mla.heads, mla.v)

    key = torch.cat((k_nope, k_rope[:, None].expand(-1, mla.heads, -1)), dim=-1)
    query = torch.cat((q_nope, q_rope), dim=-1)
    scores = at_least_float32(torch.einsum("ihd,jhd->hij", query, key)) * mla.softmax_scale()
    if mla.query_scaling_beta is not None:
        # Mistral Small 4: a query is the stronger, the more often its context has been extended.
        extended = torch.arange(length).div(mla.original_context, rounding_mode="floor")
        factors = 1 + mla.query_scaling_beta * torch.log(1 + extended.double())
        scores = scores * factors[:, None].to(scores.dtype)
    return scores, value


def output(mla: OracleMLA, w: dict[str, Tensor], x: Tensor, heads: Tensor) -> Tensor:
    """What the layer makes of the attended values [S, H, v] of its input [S, hidden]."""
    if mla.gate is not None:
        gates = len(w["w_gate"]) // mla.heads
        logits = at_least_float32((x @ w["w_gate"].T).view(len(x), mla.heads, gates))
        heads = (heads / (1 + torch.exp(-logits))).to(x.dtype)
    return heads.reshape(len(x), mla.heads * mla.v) @ w["w_o"].T


def attend(
    mla: OracleMLA, w: dict[str, Tensor], x: Tensor, visible: Tensor, table: Table
) -> Tensor:
    """The layer on one sequence: [S, hidden] -> [S, hidden]. Rows that see nothing give zero."""
    scores, value = scores_and_values(mla, w, x, table)
    if mla.window is not None:
        visible = visible & torch.ones_like(visible).triu(1 - mla.window)
    weights = probabilities(scores, visible, w.get("sinks"))
    return output(mla, w, x, torch.einsum("hij,jhv->ihv", weights.to(value.dtype), value))


def probabilities(scores: Tensor, visible: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax of scores [H, S, S] over visible keys and a sink [H]; 0 in rows that see nothing."""
    keys = scores.shape[-1]
    sees_something = visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible & sees_something, -torch.inf)
    if sinks is not None:
        column = at_least_float32(sinks)[:, None, None].expand(-1, len(visible), 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.softmax(scores, dim=-1)[..., :keys] * sees_something


def max_logits(
    mla: OracleMLA,
    w: dict[str, Tensor],
    x: Tensor,
    sequences: Sequence[TokenSequence],
    table: Table,
) -> Tensor:
    """The largest scaled score of each head that some token sees, [H], over rows [R, hidden]."""
    found = [torch.full((mla.heads,), -torch.inf, dtype=x.dtype)]
    for sequence in sequences:
        if len(sequence.rows):
            scores, _ = scores_and_values(mla, w, x[sequence.rows], table)
            found.append(scores.masked_fill(~sequence.visible, -torch.inf).amax((1, 2)))
    return torch.stack(found).amax(0)


def forward(
    mla: OracleMLA,
    w: dict[str, Tensor],
    x: Tensor,
    sequences: Sequence[TokenSequence],
    table: Table | None = None,
) -> Tensor:
    """The layer on rows [R, hidden] -> [R, hidden]; rows outside every sequence give zero."""
    if table is None:
        table = mla.rotary_table(max((len(s.rows) for s in sequences), default=0))
    w = mla.updated(w)
    output = torch.zeros_like(x)
    for sequence in sequences:
        if len(sequence.rows):
            attended = attend(mla, w, x[sequence.rows], sequence.visible, table)
            output = output.index_copy(0, sequence.rows, attended)
    return output


@dataclass(frozen=True)
class OracleResult:
    """Output and input gradient [R, hidden], and every weight's gradient by name."""

    output: Tensor
    input_grad: Tensor
    weight_grads: dict[str, Tensor]


def evaluate(
    mla: OracleMLA,
    w: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    sequences: Sequence[TokenSequence],
    table: Table | None = None,
    dtype: torch.dtype = torch.float64,
) -> OracleResult:
    """Output and gradients at ``dtype``; float64 is the truth, less a plain evaluation at it.

    ``x`` and ``output_grad`` are [R, hidden]. Values are rounded to ``dtype`` first; results are
    float64.
    """
    leaves = {name: t.to(dtype).clone().requires_grad_() for name, t in w.items()}
    x = x.to(dtype).clone().requires_grad_()
    output = forward(mla, leaves, x, sequences, table)
    inputs = [x, *leaves.values()]
    grads = torch.autograd.grad(output, inputs, output_grad.to(dtype), materialize_grads=True)
    named = {name: g.double() for name, g in zip(leaves, grads[1:], strict=True)}
    return OracleResult(output.detach().double(), grads[0].double(), named)
