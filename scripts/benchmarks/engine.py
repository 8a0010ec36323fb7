#!/usr/bin/env python3
"""Generate many requests with Megatron's dynamic engine: are the tokens right, and how fast?

    $ python scripts/benchmarks/engine.py --json engine.json
    $ python scripts/benchmarks/engine.py --batch-invariant --implementations ours
    $ NVIDIA_TF32_OVERRIDE=0 python scripts/benchmarks/engine.py --dtype float32 --num-layers 2 \
          --heads 16 --requests 100
    $ python scripts/benchmarks/engine.py --device cpu --hidden-size 64 --q-lora-rank 32 \
          --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --heads 4 \
          --ffn-hidden-size 64 --num-layers 2 --vocab-size 128 --requests 12 --longest-prompt 160 \
          --shared-prefix 70 --longest-output 40 --max-requests 8 --max-tokens 128

A model of random weights gets requests of mixed lengths at once, half of them with a beginning
that others share, in a cache that is too small for them: with prefix caching, chunked prefill,
preemption, and in half of the cases CUDA graphs. Our attention runs beside Megatron's standard MLA
in the same engine, where that runs; where it does not, its error is its row. The rate is generated
tokens over the seconds from the first request to the end of the last, after some requests that
compile the kernels. Then it is checked that no block of the cache is lost, that everything named
above has happened, and that every request has the tokens that it has alone in an eager engine. In
bfloat16 a batch of another size is rounded in another way; where the two differ, a whole forward
must say that both tokens were within --tie of the likeliest; with --batch-invariant they must not
differ. On a CPU (to try the script) graphs are the host's bookkeeping only. Output:

    30.1 s  ours, eager: tokens_per_second 2100, steps 310, mixed_steps 120, ..., same 200, ties 0

The exit code is 1 if ours is wrong; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import random
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from absorbed_mla.options import FORMS, PAGED_ATTENTION_BACKENDS
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, dims_of, list_of, one_of, seconds
from benchmarks.kit.report import Report, write_json
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from absorbed_mla.generation.engine import Engine
    from absorbed_mla.generation.requests import Result, Statistics
    from benchmarks.kit.processes import Processes

IMPLEMENTATIONS = ("ours", "standard")
SCOPES = ("layer", "block")
# Requests that run first, so that kernels are compiled when the clock starts.
WARM_UP = 8
# Different beginnings that prompts share: like the instructions of several applications.
PREFIXES = 4
# Differences of log-probabilities between tokens of which either may be chosen.
TIES = {"float32": 1e-3, "bfloat16": 0.1}

# ---- cases


@dataclass(frozen=True)
class Case:
    """One way of running all requests.

    Attributes:
        implementation: ``"ours"`` or ``"standard"``, Megatron's MLASelfAttention.
        graphs: Whether steps are replayed from CUDA graphs.
    """

    implementation: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.implementation}, {'CUDA graphs' if self.graphs else 'eager'}"


def cases(args: argparse.Namespace) -> list[Case]:
    """Eager ones first: an error in a graph may take the device away."""
    ways = (False, True) if args.num_cuda_graphs else (False,)
    found = [Case(one, graphs) for graphs in ways for one in args.implementations]
    return arguments.chosen(found, args.only)


@dataclass(frozen=True)
class Request:
    """A greedy request.

    Attributes:
        prompt: Token ids.
        num_tokens: To generate.
    """

    prompt: Sequence[int]
    num_tokens: int


def workload(args: argparse.Namespace) -> list[Request]:
    """Requests of mixed lengths, the same for every case.

    The logarithm of a prompt's length is uniform, from 4 to ``--longest-prompt``; every other
    prompt begins with one of four prefixes. As many tokens as asked for are generated: there is no
    stop token.
    """
    rng = random.Random(args.seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(args.vocab_size) for _ in range(number)]

    prefixes = [tokens(args.shared_prefix) for _ in range(PREFIXES)]
    requests = []
    for number in range(args.requests):
        prefix = rng.choice(prefixes) if number % 2 else []
        own = round(math.exp(rng.uniform(math.log(4), math.log(args.longest_prompt))))
        own = min(own, args.longest_prompt - len(prefix))
        requests.append(Request([*prefix, *tokens(own)], rng.randint(1, args.longest_output)))
    return requests


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest request, with what it generates."""
    return max(len(request.prompt) + request.num_tokens for request in requests)


def scarce_blocks(requests: Sequence[Request], max_requests: int) -> int:
    """Three fifths of what ``max_requests`` average requests need at their ends.

    Enough for the longest one by itself, which the host otherwise refuses.
    """
    needed = [_blocks(len(request.prompt) + request.num_tokens) for request in requests]
    together = min(max_requests, len(requests)) * sum(needed) / len(needed)
    return max(round(0.6 * together), 2 * max(needed))


def _blocks(tokens: int) -> int:
    from absorbed_mla.generation.blocks import BLOCK_SIZE

    return -(-tokens // BLOCK_SIZE)


# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("engine.py", __doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="where the report goes, after every case")
    arguments.add_only(parser)
    arguments.add_device(parser)
    add(
        "--dtype",
        choices=tuple(TIES),
        help="of the model (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add(
        "--implementations",
        type=list_of(one_of(IMPLEMENTATIONS)),
        default="ours,standard",
        help="whose attention",
    )
    add("--form", choices=FORMS, default="auto", help="how ours is executed")
    add(
        "--paged-attention-backend",
        choices=PAGED_ATTENTION_BACKENDS,
        default="auto",
        help="of ours, over the cache",
    )
    add("--batch-invariant", action="store_true", help="ours in parity mode: no ties")
    add("--requests", type=count, default=200, help="that come at once")
    add("--longest-prompt", type=count, default=1024, help="in tokens")
    add("--shared-prefix", type=count, default=256, help="tokens of half of the prompts")
    add("--longest-output", type=count, default=128, help="in tokens")
    add("--max-requests", type=count, default=64, help="in one forward")
    add("--max-tokens", type=count, default=1024, help="in one forward")
    add(
        "--blocks",
        type=count,
        help="of 64 tokens in the cache (default: too few for --max-requests)",
    )
    add(
        "--num-cuda-graphs",
        type=_any_count,
        default=16,
        help="sizes of steps that are captured, 0 for none",
    )
    add(
        "--cuda-graph-scope", choices=("layer", "block"), default="layer", help="what a graph holds"
    )
    add("--tie", type=seconds, help="log-probs this near are a tie (default: 0.1; in float32 1e-3)")
    add("--num-layers", type=count, default=4, help="of the model")
    add("--heads", type=count, default=128, help="of the model")
    add("--ffn-hidden-size", type=count, default=2048, help="width of the MLP")
    add("--vocab-size", type=count, default=32768, help="rows of the embedding")
    add("--time-limit", type=seconds, default=480.0, help="begin no case after so many seconds")
    arguments.add_seed(parser, "weights and requests")
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.max_tokens % 64:
        parser.error(f"--max-tokens must be a multiple of 64 for Megatron, got {args.max_tokens}")
    if args.max_tokens < args.max_requests:
        parser.error(
            f"--max-tokens must be at least --max-requests={args.max_requests}, "
            f"got {args.max_tokens}"
        )
    if args.shared_prefix >= args.longest_prompt:
        parser.error(
            f"--shared-prefix must be below --longest-prompt={args.longest_prompt}, "
            f"got {args.shared_prefix}"
        )
    require_writable(files={"--json": args.json})
    return args


def _any_count(text: str) -> int:
    return 0 if text.strip() == "0" else count(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code: 1 where ours is wrong, 2 after wrong input."""
    return run_script("engine.py", lambda: measure_all(parse_arguments(argv)))


def measure_all(args: argparse.Namespace) -> int:
    """Measure every case, and write the results after each.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    arguments.use_device(args.device)
    warnings.filterwarnings("ignore")
    from absorbed_mla.generation.cpu import enable_cpu_inference
    from benchmarks.kit.processes import Processes

    enable_cpu_inference()
    processes = Processes(args.seed)
    requests = workload(args)
    bench = Bench(args, processes, requests, begin)
    environment = provenance.describe(
        processes.on_gpu,
        bench.dtype,
        dims={**dims_of(args), "heads": args.heads, "layers": args.num_layers},
        versions=provenance.versions(["flash-mla"]),
    )
    report = EngineReport(environment)
    content = {
        "environment": environment,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "asked_for": sum(request.num_tokens for request in requests),
        "blocks": bench.blocks,
        "rows": [],
    }
    for case in cases(args):
        row = bench.measure(case)
        report.rows.append(row)
        content["rows"].append(report.as_json(row))
        print(f"{bench.elapsed:5.1f} s  {report.line(row)}", flush=True)
        if args.json:
            write_json(args.json, content)
    print(json.dumps(content))
    processes.leave()
    return int(not all(row.ok for row in report.rows if row.case.implementation == "ours"))


# ---- the models: the same weights where they have the same names, attention apart


def build(
    case: Case, args: argparse.Namespace, processes: Processes, dtype: torch.dtype
) -> GPTModel:
    """A model with random weights, in evaluation mode.

    Raises:
        ValueError: If it cannot be built here.
    """
    import torch
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla.generation.cuda_graphs import seed_generators

    config = model_config(case, args, processes, dtype)
    seed_generators(args.seed, graphs=case.graphs)
    model = GPTModel(
        config,
        transformer_layer_spec=_spec(case, config, args),
        vocab_size=args.vocab_size,
        max_sequence_length=args.longest_prompt + args.longest_output,
        position_embedding_type="rope",
    )
    model.to(processes.device, dtype)
    with torch.no_grad():
        _fill(model, args.seed)
    return model.eval()


def _fill(model: GPTModel, seed: int) -> None:
    """Set weights that keep activations near unit size, the same ones by name.

    Next to a layer's output an embedding is then small, so that the whole context decides.
    """
    import torch

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def model_config(
    case: Case, args: argparse.Namespace, processes: Processes, dtype: torch.dtype
) -> MLATransformerConfig:
    """Megatron's config; CUDA graphs in it only on a GPU."""
    import torch
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from absorbed_mla.generation.cuda_graphs import graph_fields

    graphs = case.graphs and processes.on_gpu
    return MLATransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.heads,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=10000,
        rotary_scaling_factor=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=True,
        **graph_fields(args.cuda_graph_scope if graphs else None),
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        transformer_impl="transformer_engine" if HAVE_TE and processes.on_gpu else "local",
        use_cpu_initialization=not processes.on_gpu,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _spec(case: Case, config: MLATransformerConfig, args: argparse.Namespace):
    from absorbed_mla import AbsorbedMLAOptions
    from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

    if case.implementation == "standard":
        return get_standard_mla_decoder_block_spec(config, backend=config.transformer_impl)
    options = AbsorbedMLAOptions(
        form=args.form,
        paged_attention_backend=args.paged_attention_backend,
        batch_invariant=args.batch_invariant,
    )
    return get_absorbed_mla_decoder_block_spec(
        config, backend=config.transformer_impl, options=options
    )


# ---- are the tokens those that a request has alone?


@dataclass
class Comparison:
    """Of all requests, together and alone.

    Attributes:
        equal: Requests with the same tokens.
        ties: Requests whose first different tokens are both within the tie of the likeliest.
        different: The other requests.
        worst_gap: Furthest that a chosen token was from the likeliest, in log-probability.
        examples: Numbers of some of the different ones.
    """

    equal: int = 0
    ties: int = 0
    different: int = 0
    worst_gap: float = 0.0
    examples: tuple[int, ...] = ()


def compare(
    model: GPTModel,
    requests: Sequence[Request],
    together: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    tie: float,
) -> Comparison:
    """Compare the tokens of every request.

    Args:
        model: That generated both.
        requests: Their prompts.
        together: Tokens by request.
        alone: Likewise.
        tie: Log-probability by which a chosen token may be below the likeliest.
    """
    found = Comparison()
    for number, (request, batched, single) in enumerate(zip(requests, together, alone)):
        if list(batched) == list(single):
            found.equal += 1
            continue
        gap = _gap(model, request, batched, single)
        found.worst_gap = max(found.worst_gap, gap)
        if gap <= tie:
            found.ties += 1
        else:
            found.different += 1
            found.examples = (*found.examples, number)[:8]
    return found


def _gap(model: GPTModel, request: Request, batched: Sequence[int], single: Sequence[int]) -> float:
    """How far the less likely of the first two different tokens is below the likeliest."""
    import torch
    from megatron.core.inference.utils import InferenceMode

    if len(batched) != len(single):
        return float("inf")
    at = next(i for i, (one, other) in enumerate(zip(batched, single)) if one != other)
    device = next(model.parameters()).device
    ids = torch.tensor([[*request.prompt, *batched[:at]]], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    was_active = InferenceMode.is_active()
    # A forward without a context is no inference to Megatron.
    InferenceMode.unset_active()
    with torch.inference_mode():
        scores = model(ids, positions, None)[0, -1].float().log_softmax(-1)
    if was_active:
        InferenceMode.set_active()
    return float(scores.max() - scores[[batched[at], single[at]]].min())


# ---- measuring


@dataclass
class Row:
    """All requests in one engine.

    Attributes:
        case: What ran.
        error: What it raised, or what was wrong with what it did; ``""`` if all is well.
        seconds: From the first request to the end of the last.
        generated: Tokens.
        engine: What the engine did: ``Run`` without its results.
        missing: Of what the workload should make the engine do, what did not happen.
        capture_seconds: To make the engine, CUDA graphs included.
        peak_bytes: Of device memory, or None.
        comparison: With the tokens that every request has alone, or None.
    """

    case: Case
    error: str = ""
    seconds: float | None = None
    generated: int = 0
    engine: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    capture_seconds: float | None = None
    peak_bytes: int | None = None
    comparison: Comparison | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated, over all requests."""
        return self.generated / self.seconds if self.seconds else None

    @property
    def ok(self) -> bool:
        """Whether it ran, was put to the test, and every token is right."""
        different = self.comparison.different if self.comparison else 0
        return not (self.error or self.missing or different)


class Bench:
    """Measures one case after another over the same requests.

    Args:
        args: Of the command line.
        processes: This one.
        requests: For every case.
        begin: ``time.monotonic()`` when the script began.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        processes: Processes,
        requests: Sequence[Request],
        begin: float,
    ) -> None:
        import torch

        self.args, self.processes, self.requests = args, processes, requests
        self.begin = begin
        self.dtype = getattr(torch, args.dtype) if args.dtype else processes.dtype
        self.blocks = args.blocks or scarce_blocks(requests, args.max_requests)
        # Of our attention; its weights are the same in every case.
        self._alone: list[list[int]] | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self.begin

    @property
    def tie(self) -> float:
        """Log-probability by which a token may be below the likeliest."""
        if self.args.tie is not None:
            return self.args.tie
        # In parity mode there is nothing to excuse.
        return 0.0 if self.args.batch_invariant else TIES[str(self.dtype).removeprefix("torch.")]

    def measure(self, case: Case) -> Row:
        """Measure one case; what it raises is in its row."""
        from absorbed_mla.generation.cuda_graphs import deleting_graphs

        row = Row(case)
        try:
            if self.elapsed > self.args.time_limit:
                raise TimeoutError(f"{self.args.time_limit:g} s are over (--time-limit)")
            with deleting_graphs(case.graphs and self.processes.on_gpu), self._mode(case):
                self._measure(row)
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}"
        # After the block that held the tensors of a failed case in its traceback.
        self._free_memory()
        return row

    def _measure(self, row: Row) -> None:
        import torch

        from absorbed_mla.generation.blocks import BLOCK_SIZE
        from absorbed_mla.generation.engine import Engine
        from absorbed_mla.generation.options import EngineOptions

        case, args = row.case, self.args
        self._free_memory()
        model = build(case, args, self.processes, self.dtype)
        alone = self._each_alone(model) if case.implementation == "ours" else None
        start = self._clock()
        options = EngineOptions(
            cache_tokens=self.blocks * BLOCK_SIZE,
            paused_cache_tokens=self.blocks // 10 * BLOCK_SIZE,
            num_cuda_graphs=args.num_cuda_graphs if case.graphs else None,
            **self._sizes(),
        )
        with Engine(model, options) as engine:
            row.capture_seconds = self._clock() - start
            generate(engine, self.requests[:WARM_UP])
            start = self._clock()
            results = generate(engine, self.requests)
            row.seconds = self._clock() - start
            engine.require_no_leak()
        row.peak_bytes = torch.cuda.max_memory_allocated() if self.processes.on_gpu else None
        tokens = [result.tokens for result in results]
        row.generated = sum(map(len, tokens))
        row.engine = dataclasses.asdict(engine.statistics)
        row.missing = missing(engine.statistics, case)
        row.error = errors(results)
        if alone is not None:
            row.comparison = compare(model, self.requests, tokens, alone, self.tie)

    def _mode(self, case: Case) -> contextlib.AbstractContextManager[None]:
        from absorbed_mla.batch_invariant import batch_invariant_mode

        if case.implementation == "ours" and self.args.batch_invariant:
            return batch_invariant_mode()
        return contextlib.nullcontext()

    def _each_alone(self, model: GPTModel) -> list[list[int]]:
        """Tokens of every request in an engine without anything else, eager."""
        from absorbed_mla.generation.blocks import BLOCK_SIZE
        from absorbed_mla.generation.engine import Engine
        from absorbed_mla.generation.options import EngineOptions

        if self._alone is None:
            sizes = self._sizes()
            sizes["step_tokens"] = max(sizes["step_tokens"], sizes["max_sequence_length"])
            options = EngineOptions(
                cache_tokens=self.blocks * BLOCK_SIZE,
                chunked_prefill=False,
                prefix_caching=False,
                **sizes,
            )
            with Engine(model, options) as engine:
                self._alone = [generate(engine, [request])[0].tokens for request in self.requests]
        return self._alone

    def _sizes(self) -> dict[str, int]:
        return {
            # Megatron pads to multiples of 64.
            "max_sequence_length": -(-longest(self.requests) // 64) * 64,
            "max_requests": self.args.max_requests,
            "step_tokens": self.args.max_tokens,
        }

    def _clock(self) -> float:
        """Seconds, after everything that the device was given."""
        self.processes.synchronize()
        return time.perf_counter()

    def _free_memory(self) -> None:
        """Give memory back, and begin to record its peak anew."""
        import torch

        gc.collect()
        if self.processes.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def generate(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Run greedy requests together."""
    from absorbed_mla.generation.sampling import SamplingParams

    return engine.generate(
        [request.prompt for request in requests],
        [SamplingParams(num_tokens=request.num_tokens, top_k=1) for request in requests],
    )


def missing(run: Statistics, case: Case) -> tuple[str, ...]:
    """What should have happened, and did not."""
    wanted = {
        "chunked prefill": run.chunks,
        "a prefix found": run.prefix_blocks,
        "preemption": run.evicted + run.most_paused,
        "mixed steps": run.mixed_steps,
        "graph steps": run.graph_steps or not case.graphs,
    }
    return tuple(name for name, happened in wanted.items() if not happened)


def errors(results: Sequence[Result]) -> str:
    """Error of the first request that could not run; ``""`` if there is none."""
    for number, result in enumerate(results):
        if result.error:
            return f"request {number}: {result.error}"
    return ""


# ---- report


class EngineReport(Report):
    """One run."""

    row = Row

    def as_json(self, row: Row) -> dict:
        """With the rate and the verdict."""
        derived = {"tokens_per_second": row.tokens_per_second, "ok": row.ok}
        return {**dataclasses.asdict(row), **derived}

    def figures(self, row: Row) -> dict[str, float]:
        """The rate, what the engine did, and the comparison."""
        found: dict[str, float] = {"tokens_per_second": row.tokens_per_second or 0.0, **row.engine}
        if row.comparison:
            same = row.comparison
            found |= {"same": same.equal, "ties": same.ties, "different": same.different}
        return found

    def line(self, row: Row) -> str:
        """With what did not happen."""
        missing = f"; did not happen: {', '.join(row.missing)}" if row.missing else ""
        return super().line(row) + missing


if __name__ == "__main__":
    leave(main())
