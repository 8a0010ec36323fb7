#!/usr/bin/env python3
"""Measure MLA on one GPU: whole layers beside Megatron's own, and attention beside its peers.

    $ python scripts/benchmarks/attention.py docs/attention
    $ python scripts/benchmarks/attention.py /tmp/quick --quick --suite layer --layouts sbhd
    $ python scripts/benchmarks/attention.py /tmp/absorbed --form absorbed --heads 16 --seq-lens 8k
    $ python scripts/benchmarks/attention.py docs/attention --render one.json other.json

Suite "layer": AbsorbedMLASelfAttention, with and without recomputation of mla_up_proj, beside
Megatron's MLASelfAttention of TransformerEngine's layers: time of forward and of a step, memory
kept for backward, peak. Each row is compared with Megatron's of the same recomputation.
Suite "core": attention without projections, expanded and absorbed, by our backends, PyTorch's,
TransformerEngine's and FlashAttention's. A causal sequence of S tokens and N heads counts

    pairs    = N * S^2 / 2
    forward  = pairs * 2 * (key + value) FLOP         expanded: key = nope + rope, value = v
    backward = pairs * 2 * (3 * key + 2 * value)      absorbed: key = latent + rope, value = latent

where backward is the five products S, dP, dV, dQ, dK, whatever a kernel computes again.

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32 (to try the script:
--device cpu with small dimensions). Recomputed layers come first, then the others, then attention
alone, each with smaller inputs first: what --time-limit leaves out matters least. A case that
fails has its error in its row, and the others go on. Results are written after every case. Output:

    12.3 s  ours recompute n=16 S=8192 sbhd (expanded, cudnn): step_ms 7.1, step of megatron's 0.95

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from absorbed_mla.options import FORMS as FORM_OPTIONS
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes, seconds
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Refused, Report, Results, Times, reason
from benchmarks.kit.tables import gibibytes
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.types import AttentionInputs
    from benchmarks.kit.processes import Processes

NAME = "attention"
LAYOUTS = ("sbhd", "thd")
FORMS = ("expanded", "absorbed")
LAYER_TOKENS = "4k,8k,16k,32k,64k"
CORE_TOKENS = "8k,32k"
QUICK_TOKENS = "4k,8k"
SECONDS_PER_ROW, QUICK_SECONDS_PER_ROW = 0.5, 0.1
# Of Megatron's layer with the same recomputation, that ours should reach; 1 % is the allocator's.
TARGETS = {"step": 1.0, "kept": 1.01}
# The reference holds scores in memory: pairs of all heads that it is still measured with.
REFERENCE_PAIRS = 16 * 4096**2

# ---- cases


@dataclass(frozen=True)
class LayerCase:
    """One attention layer with its projections, and its input.

    Attributes:
        implementation: ``"ours"`` or ``"megatron"``.
        recompute: Whether ``mla_up_proj`` is recomputed in backward.
        heads: Of the layer.
        tokens: Of the sequence or pack.
        layout: ``"sbhd"``, or ``"thd"``: a pack of documents of mixed lengths.
    """

    implementation: str
    recompute: bool
    heads: int
    tokens: int
    layout: str

    def __str__(self) -> str:
        recompute = " recompute" if self.recompute else ""
        return f"{self.implementation}{recompute} n={self.heads} S={self.tokens} {self.layout}"

    @property
    def compared(self) -> tuple:
        """What cases that are compared have in common."""
        return self.heads, self.tokens, self.layout, self.recompute


@dataclass(frozen=True)
class CoreCase:
    """Causal attention of one sequence, without projections.

    Attributes:
        implementation: Who computes it, one of :data:`IMPLEMENTATIONS`.
        form: ``"expanded"`` (keys and values of every head) or ``"absorbed"`` (one latent).
        heads: Query heads.
        tokens: Of the sequence.
    """

    implementation: str
    form: str
    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.implementation} {self.form} n={self.heads} S={self.tokens}"


Case = LayerCase | CoreCase


def cases(args: argparse.Namespace) -> list[Case]:
    """All cases, in the order of what matters; see above."""
    layers: list[Case] = [
        LayerCase(implementation, recompute, heads, tokens, layout)
        for recompute in (True, False)
        for tokens in sorted(args.seq_lens or parse_sizes(LAYER_TOKENS))
        for heads in sorted(args.heads)
        for layout in args.layouts
        for implementation in ("megatron", "ours")
    ]
    cores: list[Case] = [
        CoreCase(implementation, form, heads, tokens)
        for tokens in sorted(args.seq_lens or parse_sizes(CORE_TOKENS))
        for heads in sorted(args.heads)
        for form in FORMS
        for implementation in IMPLEMENTATIONS
    ]
    wanted = {"layer": layers, "core": cores, "all": layers + cores}[args.suite]
    return arguments.chosen(wanted, args.only)


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Mixed lengths that sum to ``tokens``, the same for the same arguments.

    From single tokens to half of the pack, most of them short.
    """
    draw = random.Random(f"{seed} {tokens}")
    lengths, left = [], tokens
    while left:
        length = min(left, max(1, round(tokens * 0.5 * draw.random() ** 3)))
        lengths.append(length)
        left -= length
    return lengths


def pair_widths(form: str, dims: dict[str, int]) -> tuple[int, int]:
    """Widths of a key and of a value.

    Args:
        form: One of ``FORMS``.
        dims: The layer's, by the names of ``DIMS``.
    """
    rope = dims["qk-pos-emb-head-dim"]
    if form == "absorbed":
        return dims["kv-lora-rank"] + rope, dims["kv-lora-rank"]
    return dims["qk-head-dim"] + rope, dims["v-head-dim"]


def attention_flops(case: CoreCase, dims: dict[str, int]) -> tuple[float, float]:
    """Floating-point operations of forward and of backward; see above."""
    key, value = pair_widths(case.form, dims)
    pairs = case.heads * case.tokens**2 / 2
    return pairs * 2 * (key + value), pairs * 2 * (3 * key + 2 * value)


# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("attention.py", __doc__)
    add = parser.add_argument
    arguments.add_folder(parser, "attention.json and .png")
    add("--suite", choices=("layer", "core", "all"), default="all", help="what is measured")
    arguments.add_only(parser)
    arguments.add_device(parser)
    add("--quick", action="store_true", help=f"short: {QUICK_TOKENS} tokens, unless given")
    add("--heads", type=parse_sizes, default="128,16", help="of the layer or attention")
    add(
        "--seq-lens",
        type=parse_sizes,
        help="of a sequence or pack, k is 1024 "
        f"(default: {LAYER_TOKENS} for layers, {CORE_TOKENS} for attention alone)",
    )
    add("--layouts", type=list_of(one_of(LAYOUTS)), default="sbhd,thd", help="thd: packs")
    add("--form", choices=FORM_OPTIONS, default="auto", help="how our layer is executed")
    add(
        "--backend",
        choices=CORE_ATTENTION_BACKENDS,
        default="auto",
        help="core_attention_backend of our layer",
    )
    add("--rope-type", choices=("rope", "yarn"), default="rope", help="rotary embedding")
    add("--rope-fusion", action="store_true", help="of Megatron's layers; only with yarn")
    add(
        "--seconds-per-row",
        type=seconds,
        help=f"of repetitions (default: {SECONDS_PER_ROW}, quick {QUICK_SECONDS_PER_ROW})",
    )
    add(
        "--longest-step",
        type=seconds,
        default=5.0,
        help="leave out rows whose step will take more seconds, by the next smaller one's time",
    )
    add("--time-limit", type=seconds, default=240.0, help="leave out rows after so many seconds")
    arguments.add_seed(parser, "weights, inputs and packs")
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.rope_fusion and args.rope_type != "yarn":
        parser.error("--rope-fusion needs --rope-type yarn: Megatron fuses no other in MLA")
    if args.quick and args.seq_lens is None:
        args.seq_lens = parse_sizes(QUICK_TOKENS)
    if args.seconds_per_row is None:
        args.seconds_per_row = QUICK_SECONDS_PER_ROW if args.quick else SECONDS_PER_ROW
    arguments.check_files(args.folder, args.render)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    return run_script("attention.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> None:
    if args.render:
        results(AttentionReport.show_again(args.render)).publish(args.folder, NAME)
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure every case, write the results after each, and render.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    arguments.use_device(args.device)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from benchmarks.kit.processes import Processes
    from benchmarks.kit.timing import ceilings

    processes = Processes(args.seed)
    environment = provenance.describe(
        processes.on_gpu,
        processes.dtype,
        dims=dims_of(args),
        rope_type=args.rope_type,
        form=args.form,
        backend=args.backend,
        ceilings=ceilings(processes.on_gpu),
    )
    bench = Bench(args, processes, begin)
    report = AttentionReport(environment)
    for case in cases(args):
        report.rows.append(bench.measure(case))
        report.write(args.folder / f"{NAME}.json")
        print(f"{bench.elapsed:5.1f} s  {report.line(report.rows[-1])}", flush=True)
    results([report]).publish(args.folder, NAME)
    # Last: a device that a kernel's fault took away may not answer.
    processes.leave()


# ---- measuring


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        forward: None if it was not measured.
        backward: None if it was not measured.
        step: Forward and backward; None if it was not measured.
        kept_bytes: Allocated by forward until backward; None without a GPU.
        peak_bytes: The most allocated during a step beyond weights, input and output gradient;
            None without a GPU.
        ran: Form and backend that a layer of ours chose.
        error: Empty, or why figures are missing.
    """

    case: LayerCase | CoreCase
    forward: Times | None = None
    backward: Times | None = None
    step: Times | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    ran: str = ""
    error: str = ""

    @property
    def suite(self) -> str:
        """``"layer"`` or ``"core"``."""
        return "layer" if isinstance(self.case, LayerCase) else "core"


class Bench:
    """Measures one case after another, on one device.

    Args:
        args: Of the command line.
        processes: This one.
        begin: ``time.monotonic()`` when the script began.
    """

    def __init__(self, args: argparse.Namespace, processes: Processes, begin: float) -> None:
        self.args, self.processes, self.begin = args, processes, begin
        # Of the last case of each series that was measured: its cost and its seconds.
        self._known: dict[tuple, tuple[float, float]] = {}

    def measure(self, case: Case) -> Row:
        """Measure one case; what it raises is in its row."""
        import torch

        function: Callable = measure_layer if isinstance(case, LayerCase) else measure_core
        try:
            self._refuse_late()
            self._refuse_long(case)
            row = function(case, self.args, self.processes)
        except Exception as error:
            row = Row(case=case, error=reason(error))
        # After the block that held the tensors of a failed case in its traceback.
        gc.collect()
        # It fails where a kernel's fault took the device away, which the next rows will say.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        longest = row.step or row.forward
        if longest is not None:
            self._known[self._series(case)] = (self._cost(case), longest.median)
        return row

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self.begin

    def _refuse_late(self) -> None:
        if self.elapsed > self.args.time_limit:
            raise Refused(f"left out: {self.args.time_limit:g} s are over (--time-limit)")

    def _refuse_long(self, case: Case) -> None:
        known = self._known.get(self._series(case))
        if known is None:
            return
        expected = known[1] * self._cost(case) / known[0]
        if expected > self.args.longest_step:
            raise Refused(f"left out: a step would take about {expected:.0f} s (--longest-step)")

    def _cost(self, case: Case) -> float:
        """What the time of cases of one series grows with, at most."""
        if isinstance(case, CoreCase):
            return sum(attention_flops(case, dims_of(self.args)))
        return case.heads * case.tokens**2

    def _series(self, case: Case) -> tuple:
        if isinstance(case, CoreCase):
            return case.implementation, case.form
        return case.implementation, case.recompute, case.heads, case.layout


def measure_layer(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Row:
    """Time and memory of a layer; whatever fails is raised."""
    from benchmarks.kit.chosen_backends import ChosenBackends
    from benchmarks.kit.layers import observe
    from benchmarks.kit.timing import Repeated

    subject = build_layer(case, args, processes)
    ran = ChosenBackends(subject.layer)
    # The first step compiles, and allocates what stays allocated.
    subject.backward(subject.forward())
    subject.forget_gradients()
    processes.synchronize()
    begin = time.perf_counter()
    observed = observe(subject, processes)
    duration = time.perf_counter() - begin
    repeated = Repeated(
        subject.forward, subject.backward, subject.forget_gradients, on_gpu=processes.on_gpu
    )
    forward, backward, step = repeated.times(duration, args.seconds_per_row)
    return Row(
        case=case,
        forward=forward,
        backward=backward,
        step=step,
        kept_bytes=observed.kept_bytes,
        peak_bytes=observed.peak_bytes,
        ran=str(ran),
    )


def build_layer(case: LayerCase, args: argparse.Namespace, processes: Processes):
    """The layer with its input.

    Raises:
        Refused: If it cannot be built here.
    """
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit import layers

    ours = case.implementation == "ours"
    config = layers.layer_config(
        args,
        processes,
        heads=case.heads,
        recompute="mla_up_proj" if case.recompute else None,
        rope_fusion=args.rope_fusion and not ours,
    )
    options = AbsorbedMLAOptions(form=args.form, core_attention_backend=args.backend)
    packed = None
    if case.layout == "thd":
        packed = layers.pack(document_lengths(case.tokens, args.seed), processes.device)
    return layers.build(config, options if ours else None, processes, case.tokens, packed)


@dataclass(frozen=True)
class Attention:
    """An attention on fixed inputs.

    Attributes:
        forward: Output and whatever backward needs.
        backward: Gradients of all inputs, from what ``forward`` returned.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def measure_core(case: CoreCase, args: argparse.Namespace, processes: Processes) -> Row:
    """Time of forward and backward; an error of forward is raised, one of backward is noted."""
    from benchmarks.kit.timing import Repeated

    attention = build_core(case, args, processes)
    error = ""
    backward: Callable[[Any], Any] | None = attention.backward
    result = attention.forward()
    try:
        attention.backward(result)
    except Exception as problem:
        backward, error = None, f"backward: {reason(problem)}"
    del result
    processes.synchronize()
    repeated = Repeated(attention.forward, backward, on_gpu=processes.on_gpu)
    forward, backward_times, step = repeated.times(repeated.once(), args.seconds_per_row)
    return Row(case=case, forward=forward, backward=backward_times, step=step, error=error)


def build_core(case: CoreCase, args: argparse.Namespace, processes: Processes) -> Attention:
    """The attention, with random inputs on the device.

    Raises:
        Refused: If the implementation cannot do this case, or is not here.
    """
    import torch

    dims = dims_of(args)
    scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
    inputs = random_inputs(case, dims, processes)
    value = inputs.k_content if inputs.value is None else inputs.value
    grad_out = processes.random(case.tokens, 1, case.heads, value.shape[-1])
    if case.implementation in OURS:
        return _ours(case, dims, processes, inputs, scale, grad_out)
    attend, leaves = PEERS[case.implementation](inputs, scale)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out.view_as(out))

    return Attention(attend, backward)


def random_inputs(case: CoreCase, dims: dict[str, int], processes: Processes) -> AttentionInputs:
    """Normal values, laid out as a layer has them.

    Expanded, content and rope are together; absorbed, the queries' are apart, and the keys' are
    views of one [latent | k_rope].
    """
    from absorbed_mla.core_attention.types import AttentionInputs

    tokens, heads = case.tokens, case.heads
    key_width, value_width = pair_widths(case.form, dims)
    if case.form == "expanded":
        q, k = (processes.random(tokens, 1, heads, key_width) for _ in range(2))
        return AttentionInputs.multi_head(q, k, processes.random(tokens, 1, heads, value_width))
    widths = [value_width, key_width - value_width]
    q_content, q_rope = (processes.random(tokens, 1, heads, width) for width in widths)
    latent, k_rope = processes.random(tokens, 1, key_width).split(widths, dim=-1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)


def _ours(
    case: CoreCase,
    dims: dict[str, int],
    processes: Processes,
    inputs: AttentionInputs,
    scale: float,
    grad_out: Tensor,
) -> Attention:
    """One of our backends.

    Raises:
        Refused: If it cannot do this, with its reason.
    """
    import torch

    from absorbed_mla.core_attention.backend import AttentionRequest
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
    from absorbed_mla.registry import ATTENTION_BACKENDS

    name = case.implementation.removeprefix("ours, ")
    if name == "reference" and case.heads * case.tokens**2 > REFERENCE_PAIRS:
        raise Refused("the reference is measured at small sizes only")
    key_width, value_width = pair_widths(case.form, dims)
    request = AttentionRequest(
        device=processes.device,
        dtype=processes.dtype,
        key_width=key_width,
        value_width=value_width,
        form=case.form,
        masked=False,
        dropout=False,
    )
    runnable, reasons = ATTENTION_BACKENDS.examine(name, request)
    if not runnable:
        raise Refused(reasons[name])
    backend = runnable[0]
    rules = ScoreRules(scale=scale, spans=(Span(0, case.tokens, 0, case.tokens, 0),))
    grad = OutputGradient(grad_out, None)

    @torch.no_grad()
    def forward() -> AttentionOutput:
        out, lse = backend.forward(inputs, rules)
        return AttentionOutput(out.to(grad_out.dtype), lse)

    @torch.no_grad()
    def backward(attended: AttentionOutput) -> AttentionInputs:
        return backend.backward(grad, attended, inputs, rules)

    return Attention(forward, backward)


# ---- peers
#
# A peer gets the inputs and the scale. It returns the attention, a function without arguments that
# keeps the LSE for its backward, and the tensors that gradients are taken of. Queries, keys and
# values lie in memory as Megatron has them, [S, B, N, D].

Attend = Callable[[], "Tensor"]
Built = tuple[Attend, "tuple[Tensor, ...]"]

# What PyTorch raises where its backend refuses.
_NO_KERNEL = ("No available kernel", "No viable backend")
# In its warnings: headings, and that the other backends are switched off.
_NO_REASON = ("not used because", "runtime disabled")
# What TransformerEngine raises where all its attentions refuse.
_TE_HAS_NONE = "No dot product attention backend"
_TE_VARIABLES = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}


def torch_sdpa(backend: str, inputs: AttentionInputs, scale: float) -> Built:
    """PyTorch's scaled_dot_product_attention with one of its backends, [B, N, S, D] views."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = _joined(inputs)

    def attend() -> Tensor:
        heads, key, value = (
            x.expand(-1, -1, q.shape[2], -1).permute(1, 2, 0, 3) for x in (q, k, _value(k, v))
        )
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            out = functional.scaled_dot_product_attention(
                heads, key, value, is_causal=True, scale=scale
            )
        return out.permute(2, 0, 1, 3)

    _refuse_as_torch_does(attend)
    return attend, _leaves(q, k, v)


def transformer_engine(inputs: AttentionInputs, scale: float) -> Built:
    """TransformerEngine's fused attention (cuDNN's), by its DotProductAttention."""
    module = _import("transformer_engine.pytorch", "TransformerEngine")
    q, k, v = _joined(inputs)
    with only_fused():
        attention = module.DotProductAttention(
            q.shape[2],
            (q.shape[3], v.shape[3]),
            num_gqa_groups=k.shape[2],
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            softmax_scale=scale,
        )

    def attend() -> Tensor:
        try:
            with only_fused():
                return attention(q, k, _value(k, v))
        except ValueError as error:
            if _TE_HAS_NONE not in str(error):
                raise
            raise Refused("cuDNN's attention does not take this, says TransformerEngine") from None

    return attend, _leaves(q, k, v)


def flash_attention(module: str, inputs: AttentionInputs, scale: float) -> Built:
    """FlashAttention-3 or 4, [B, S, N, D]; the latent as its value, with ``qv``."""
    function = _import(module, module).flash_attn_func
    extra: dict[str, Tensor] = {}
    if inputs.value is not None:
        leaves = q, k, v = _joined(inputs)
    else:
        q, qv = (x.detach().clone().requires_grad_() for x in (inputs.q_rope, inputs.q_content))
        k = inputs.k_rope.unsqueeze(2).detach().clone().requires_grad_()
        v = inputs.k_content.detach().clone().requires_grad_()
        extra, leaves = {"qv": qv}, (q, qv, k, v)

    def attend() -> Tensor:
        more = {name: x.transpose(0, 1) for name, x in extra.items()}
        swapped = (x.transpose(0, 1) for x in (q, k, v))
        out = function(*swapped, softmax_scale=scale, causal=True, **more)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)

    return attend, leaves


@contextlib.contextmanager
def only_fused() -> Iterator[None]:
    """Let TransformerEngine take no attention but cuDNN's."""
    former = {name: os.environ.get(name) for name in _TE_VARIABLES}
    os.environ.update(_TE_VARIABLES)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _joined(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Query [S, B, N, K], key [S, B, N or 1, K] and value [S, B, N or 1, V], leaves of autograd.

    The latent's value is a view of its key.
    """
    import torch

    if inputs.value is not None:
        q, k, v = (x.detach().requires_grad_() for x in inputs.as_multi_head())
        return q, k, v
    q_content, q_rope, latent, k_rope, _ = inputs
    q = torch.cat((q_content, q_rope), dim=-1).requires_grad_()
    k = torch.cat((latent, k_rope.unsqueeze(2)), dim=-1).requires_grad_()
    return q, k, k[..., : latent.shape[-1]]


def _value(k: Tensor, v: Tensor) -> Tensor:
    """``v``, anew where it is a view of the key: backward of the last call freed its graph."""
    return v if v.is_leaf else k[..., : v.shape[-1]]


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x.is_leaf)


def _refuse_as_torch_does(attend: Attend) -> None:
    """Raise why PyTorch's backend does not take these inputs, which it warns about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend()
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_KERNEL):
                raise
            reasons = [str(one.message).split(" (Triggered internally")[0] for one in caught]
            own = [text for text in reasons if not any(words in text for words in _NO_REASON)]
            raise Refused("; ".join(own) or "this device has no such kernel") from None


def _import(module: str, name: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"{name} cannot be imported: {error}") from None


PEERS: dict[str, Callable[[Any, float], Built]] = {
    "torch, cudnn": partial(torch_sdpa, "CUDNN_ATTENTION"),
    "torch, efficient": partial(torch_sdpa, "EFFICIENT_ATTENTION"),
    "torch, flash": partial(torch_sdpa, "FLASH_ATTENTION"),
    "TransformerEngine": transformer_engine,
    "FlashAttention-3": partial(flash_attention, "flash_attn_interface"),
    "FlashAttention-4": partial(flash_attention, "flash_attn.cute"),
}
OURS = tuple(f"ours, {name}" for name in CORE_ATTENTION_BACKENDS if name != "auto")
IMPLEMENTATIONS = (*OURS, *PEERS)

# ---- report


class AttentionReport(Report):
    """One run; ratios of a layer are to Megatron's, rates of an attention in TFLOP/s."""

    row = Row

    def as_json(self, row: Row) -> dict:
        """With the suite, for readers of the file."""
        return {"suite": row.suite, **super().as_json(row)}

    def of(self, suite: str) -> list[Row]:
        """Rows of a suite with times; backward may have failed."""
        return [row for row in self.rows if row.suite == suite and row.forward is not None]

    def peer(self, row: Row) -> Row | None:
        """Megatron's layer on the same input with the same recomputation, if it was measured."""
        for other in self.of("layer"):
            alike = other.case.compared == row.case.compared
            if alike and other.case.implementation == "megatron":
                return other
        return None

    def ratios(self, row: Row) -> dict[str, float]:
        """Times of forward and step and kept memory, divided by the peer's."""
        peer = self.peer(row)
        if peer is None or peer is row:
            return {}
        found = {}
        for name in ("forward", "step"):
            own, other = getattr(row, name), getattr(peer, name)
            if own and other:
                found[name] = own.median / other.median
        if row.kept_bytes and peer.kept_bytes:
            found["kept"] = row.kept_bytes / peer.kept_bytes
        return found

    def tflops(self, row: Row) -> dict[str, float]:
        """Of an attention alone: of forward, backward and both."""
        forward, backward = attention_flops(row.case, self.environment["dims"])
        counts = {"forward": forward, "backward": backward, "step": forward + backward}
        times = {name: getattr(row, name) for name in counts}
        return {name: counts[name] / one.median / 1e12 for name, one in times.items() if one}

    def figures(self, row: Row) -> dict[str, float]:
        """Of both suites."""
        if row.suite == "core":
            return {f"{name} TFLOP/s": value for name, value in self.tflops(row).items()}
        times = {f"{name}_ms": 1e3 * getattr(row, name).median for name in ("forward", "step")}
        ratios = self.ratios(row).items()
        ratios_named = {f"{name} of megatron's": value for name, value in ratios}
        return times | gibibytes(row) | ratios_named


def results(reports: Sequence[AttentionReport]) -> Results:
    """Everything that is shown."""
    return Results(reports, panels(reports), [targets(reports)])


def targets(reports: Sequence[AttentionReport]) -> str:
    """Whether ours reaches the targets, a line for each layer; empty without any."""
    lines = []
    for report in reports:
        for row in report.of("layer"):
            ratios = {name: x for name, x in report.ratios(row).items() if name in TARGETS}
            if "step" in ratios:
                met = all(x <= TARGETS[name] for name, x in ratios.items())
                shown = ", ".join(f"{name} {x:.3f}" for name, x in ratios.items())
                lines.append(f"- {'met' if met else 'missed'}: {row.case}: {shown}")
    bounds = ", ".join(f"{name} at most {value:g}" for name, value in TARGETS.items())
    return "\n".join([f"Targets ({bounds} of megatron's):", "", *lines]) if lines else ""


def panels(reports: Sequence[AttentionReport]) -> list[Panel]:
    """Ratios of ours to Megatron's layer, and TFLOP/s of attention alone."""
    found = []
    for what, target in TARGETS.items():
        points = sorted(
            (f"{what} of megatron's, {case.layout}, {case.heads} heads", name, case.tokens, ratio)
            for report in reports
            for row in report.of("layer")
            for case in (row.case,)
            # Ratios are ours: Megatron's are what they are divided by.
            for name in ("both layers recompute" if case.recompute else "neither recomputes",)
            for ratio in (report.ratios(row).get(what),)
            if ratio is not None
        )
        found += collected(points, "tokens", levels={"target": target})
    rates = sorted(
        (f"{case.form}, {what}, {case.heads} heads [TFLOP/s]", case.implementation, case.tokens, x)
        for report in reports
        for row in report.of("core")
        for case in (row.case,)
        for what, x in report.tflops(row).items()
        if what != "step"
    )
    return found + collected(rates, "tokens")


if __name__ == "__main__":
    leave(main())
