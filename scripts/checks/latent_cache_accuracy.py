#!/usr/bin/env python3
r"""Measure what a latent cache in FP8 costs in accuracy, with a trained model, on a CPU.

    $ bash scripts/quickstart.sh
    $ python scripts/checks/latent_cache_accuracy.py quickstart_output/trained \
          --json docs/measurements/inference/latent-cache.json

Every row has the same weights and the same texts; the first one is what the others are compared
with: fp32, cached as computed. The texts are new cuts of what the quickstart's model is trained on,
which counts in words; unseen text, a page of docs/, is of another kind. All latents are read from
the cache: those of a prompt of 64 bytes, then of the rest, eight bytes at a time.

    attention error  of the layers' outputs, from the same hidden states: norm of the difference
                     over the norm, the largest of all layers
    same choice      bytes whose most likely next byte is the first row's
    same texts       prompts that are continued greedily by the same --new-tokens bytes
    perplexity       exp(mean of -log p) of a byte

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.report import write_json
from benchmarks.kit.tables import markdown_table
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script
from counting import WORDS, count_from

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
_UNSEEN = ROOT / "docs" / "attention.md"
# Computed in, cached in.
CASES = (
    ("float32", "model"),
    ("float32", "fp8"),
    ("bfloat16", "model"),
    ("bfloat16", "fp8"),
)
_BYTES, _PROMPT, _STEP = 400, 64, 8


@dataclass(frozen=True)
class Found:
    """What one model gave.

    Attributes:
        hidden: Inputs of the attention layers, of the first model.
        layers: Outputs of the attention layers for them.
        logits: Of the texts that count and of the unseen one, fp32 [texts, bytes, vocabulary].
        written: Greedy continuations.
        row_bytes: Of a token and layer in the cache.
    """

    hidden: list[Tensor]
    layers: list[Tensor]
    logits: tuple[Tensor, Tensor]
    written: list[list[int]]
    row_bytes: int


def main(argv: list[str] | None = None) -> int:
    """Measure all cases; returns the exit code."""
    return run_script("latent_cache_accuracy.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    parser = Parser("latent_cache_accuracy.py", __doc__)
    parser.add_argument("model", type=Path, help="folder with a checkpoint of a model of bytes")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--texts", type=int, default=20, help="texts that count")
    parser.add_argument("--new-tokens", type=int, default=60, help="bytes of a continuation")
    args = parser.parse_args(argv)
    if not 1 <= args.texts <= len(WORDS):
        parser.error(f"--texts must be from 1 to {len(WORDS)}, got {args.texts}")
    if args.json:
        require_writable(files={"--json": args.json})
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    rows = measure(args)
    about = {
        **provenance.source(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, CPU only",
    }
    if args.json:
        write_json(args.json, {"environment": about, "rows": rows})
    print(json.dumps(rows))


def measure(args: argparse.Namespace) -> list[dict]:
    """One row for each of :data:`CASES`."""
    import torch

    stride = len(WORDS) // args.texts
    starts = range(0, args.texts * stride, stride)
    texts = [list(count_from(start, 45).encode()[:_BYTES]) for start in starts]
    tokens = torch.tensor(texts), torch.tensor(list(_UNSEEN.read_bytes()[: 5 * _BYTES]))
    tokens = tokens[0], tokens[1].view(5, _BYTES)
    rows: list[dict] = []
    first: Found | None = None
    for dtype, cache in CASES:
        model = _model(args.model, dtype, cache)
        found = _found(model, tokens, args.new_tokens, first)
        first = first or found
        row = {"dtype": dtype, "cache": cache, **_figures(found, first, tokens[0])}
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def _model(folder: Path, dtype: str, cache: str) -> GPTModel:
    import torch.distributed as dist

    from absorbed_mla.serving.executor.process_groups import join
    from absorbed_mla.serving.llm_options import LLMOptions
    from absorbed_mla.serving.weights.load import load_model, open_model

    options = LLMOptions(
        dtype=dtype, latent_cache_dtype=cache, tensor_parallel_size=1, form="absorbed"
    )
    with tempfile.TemporaryDirectory() as store:
        device = join(options, 0, 1, dist.FileStore(f"{store}/store", 1))
        return load_model(open_model(folder), options, device)


def _found(
    model: GPTModel, tokens: tuple[Tensor, Tensor], new_tokens: int, first: Found | None
) -> Found:
    from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, all_block_bytes

    hidden = first.hidden if first else _hidden_states(model, tokens[0])
    layers = len(model.decoder.layers)
    return Found(
        hidden,
        _attention_outputs(model, hidden),
        (_cached_logits(model, tokens[0]), _cached_logits(model, tokens[1])),
        _continuations(model, tokens[0][:, :_PROMPT].tolist(), new_tokens),
        all_block_bytes(model) // (BLOCK_SIZE * layers),
    )


def _hidden_states(model: GPTModel, tokens: Tensor) -> list[Tensor]:
    """Inputs of the attention layers in a forward without a cache, [S, B, hidden]."""
    import torch

    found: list[Tensor] = []
    hooks = [
        layer.self_attention.register_forward_pre_hook(
            lambda module, inputs, keywords: found.append(
                (inputs[0] if inputs else keywords["hidden_states"]).clone()
            ),
            with_kwargs=True,
        )
        for layer in model.decoder.layers
    ]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        model(tokens, positions, None)
    for hook in hooks:
        hook.remove()
    return found


def _attention_outputs(model: GPTModel, hidden: list[Tensor]) -> list[Tensor]:
    """Of every layer over a cache of its own, fp32."""
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    outputs = []
    with torch.no_grad():
        for layer, states in zip(model.decoder.layers, hidden):
            attention = layer.self_attention
            context = StaticInferenceContext(states.shape[1], states.shape[0])
            states = states.to(attention.linear_k_up_proj.weight.dtype)
            outputs.append(attention(states, None, inference_context=context)[0].float())
    return outputs


def _cached_logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """Logits of every byte, of a prompt and then of some bytes at a time, fp32."""
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    context = StaticInferenceContext(*tokens.shape)
    context.config.materialize_only_last_token_logits = False
    parts = tokens[:, :_PROMPT], *tokens[:, _PROMPT:].split(_STEP, dim=1)
    found = []
    with torch.inference_mode():
        for part in parts:
            start = context.sequence_len_offset
            positions = torch.arange(start, start + part.shape[1]).expand_as(part)
            found.append(model(part, positions, None, inference_context=context).float())
            context.sequence_len_offset += part.shape[1]
    return torch.cat(found, dim=1)


def _continuations(model: GPTModel, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """By the engine, greedily."""
    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.engine_options import EngineOptions
    from absorbed_mla.serving.sampling.parameters import SamplingParams

    sizes = EngineOptions(max_sequence_length=_PROMPT + new_tokens, max_requests=len(prompts))
    engine = Engine(model, sizes)
    results = engine.generate(prompts, SamplingParams(max_tokens=new_tokens, temperature=0))
    engine.close()
    return [result.tokens for result in results]


def _figures(found: Found, first: Found, counting: Tensor) -> dict[str, float]:
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found.layers, first.layers)]
    figures = {"row_bytes": found.row_bytes, "attention_error": max(errors)}
    for name, logits, known in zip(("", "_unseen"), found.logits, first.logits):
        same = logits.argmax(-1) == known.argmax(-1)
        figures[f"same_choice{name}"] = float(same.double().mean())
    log_probs = found.logits[0][:, :-1].double().log_softmax(-1)
    chosen = log_probs.gather(-1, counting[:, 1:, None])
    figures["perplexity"] = math.exp(-float(chosen.mean()))
    equal = [a == b for a, b in zip(found.written, first.written)]
    return {**figures, "same_texts": sum(equal) / len(equal)}


def table(docs: Path) -> str:
    """The results in ``docs/measurements/inference/latent-cache.json``."""
    rows = json.loads((docs / "inference" / "latent-cache.json").read_text())["rows"]
    lines = [
        [
            row["dtype"],
            "FP8" if row["cache"] == "fp8" else row["dtype"],
            str(row["row_bytes"]),
            f"{row['attention_error']:.1e}",
            *(f"{row[f'same_choice{text}']:.4f}" for text in ("", "_unseen")),
            f"{row['same_texts']:.2f}",
            f"{row['perplexity']:.4f}",
        ]
        for row in rows
    ]
    head = ["computed in", "cached in", "bytes", "attention error", "same choice", "of unseen text"]
    head += ["same texts", "perplexity"]
    return markdown_table(head, lines, ["computed in", "cached in"])


if __name__ == "__main__":
    leave(main())
