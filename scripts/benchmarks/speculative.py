#!/usr/bin/env python3
"""Speculative decoding with MTP layers: are the tokens the same, and how much faster do they come?

    $ python scripts/benchmarks/speculative.py --json docs/inference/speculative.json
    $ python scripts/benchmarks/speculative.py --device cpu --num-layers 2 --hidden-size 64 \
          --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 \
          --v-head-dim 16 --heads 4 --ffn-hidden-size 128 --train-iters 5 --train-batch 2 \
          --train-length 64 --batches 1,2 --tokens 12 --rounds 1

A model with two multi-token-prediction (MTP) layers is trained on the bytes of Python's standard
library, so that drafts are right as often as a small model's are. Then the live model continues
files that it has not seen, greedily, through ``LLM.from_model`` with 0, 1 and 2 drafts, in turn and
repeatedly; rates are medians of generated tokens per second, prefill included. With --parity the
tokens must be equal to the bit; otherwise products of other shapes round differently, and the share
of equal requests is reported. Output:

    60.1 s  1 requests, 2 drafts: tokens_per_second 310, speedup 1.71, accepted 0.64, equal 1

The exit code is 1 if tokens differ in parity mode; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, dims_of, parse_sizes
from benchmarks.kit.generating import GeneratingBenchmark
from benchmarks.kit.report import Report, measured_fields
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from absorbed_mla import LLM

DRAFTS = (0, 1, 2)
# Bytes, and what pads the embedding to a multiple of 64.
VOCABULARY = 320
PROMPT = 256


@dataclass(frozen=True)
class Case:
    """Requests that run together.

    Attributes:
        requests: Their number.
        drafts: Tokens that are drafted per request and step.
    """

    requests: int
    drafts: int

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.drafts} drafts"


@dataclass(frozen=True)
class Row:
    """What one case did.

    Attributes:
        case: What ran.
        error: What it raised, or what was wrong; ``""`` if all is well.
        tokens_per_second: Median over the rounds.
        speedup: Over the same requests without drafts.
        accepted: Share of the drafts that were right.
        equal: Share of requests with the tokens that they have without drafts.
        steps: Forward passes of one round.
    """

    case: Case
    error: str = ""
    tokens_per_second: float | None = None
    speedup: float | None = None
    accepted: float | None = None
    equal: float | None = None
    steps: int | None = None


class SpeculativeReport(Report):
    """One run."""

    row = Row

    def summary(self) -> dict:
        """The whole file."""
        rows = [self.as_json(row) for row in self.rows]
        return {"environment": self.environment, "rows": rows}

    def figures(self, row: Row) -> dict[str, float]:
        """All that were measured."""
        return measured_fields(row)


class SpeculativeBenchmark(GeneratingBenchmark):
    """All cases over one trained model, on one device."""

    script = "speculative.py"
    report = SpeculativeReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        from absorbed_mla.batch_invariant import enable_batch_invariant_mode

        if args.parity:
            enable_batch_invariant_mode(self.processes.device.type)
        texts = _texts()
        self.prompts = [list(text[:PROMPT]) for text in texts[: max(args.batches)]]
        self.model = build(args, self.processes)
        self.losses = train(self.model, texts[max(args.batches) :], args, self.processes)
        self._plain: dict[int, tuple[float, list[list[int]]]] = {}

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, render=None, device=None, seed=1234)
        add("--batches", type=parse_sizes, default="1,8,32", help="numbers of requests")
        add("--tokens", type=count, default=256, help="to generate for each request")
        add("--rounds", type=count, default=3, help="measurements of each case")
        add("--parity", action="store_true", help="parity mode, which allows no different tokens")
        add("--train-iters", type=count, default=400, help="training steps")
        add("--train-batch", type=count, default=16, help="sequences of a training step")
        add("--train-length", type=count, default=1024, help="bytes of a sequence")
        add("--num-layers", type=count, default=12, help="decoder layers of the model")
        add("--heads", type=count, default=16, help="attention heads of each layer")
        add("--ffn-hidden-size", type=count, default=6144, help="width of the MLP")
        arguments.add_dims(parser, {**DIMS, "hidden-size": 2048})

    def environment(self) -> dict:
        """With the sizes of the model, and how well it predicts."""
        args = self.args
        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims={**dims_of(args), "heads": args.heads, "layers": args.num_layers},
            parity=args.parity,
            train_iters=args.train_iters,
            first_loss=self.losses[0],
            last_loss=statistics.mean(self.losses[-10:]),
            tokens=args.tokens,
            prompt=PROMPT,
        )

    def cases(self) -> list[Case]:
        """Without drafts first."""
        return [Case(requests, drafts) for requests in self.args.batches for drafts in DRAFTS]

    def measure(self, case: Case) -> Row:
        """Measure one case."""
        from absorbed_mla import LLM

        with LLM.from_model(
            self.model,
            max_num_seqs=case.requests,
            max_model_len=PROMPT + self.args.tokens,
            num_speculative_tokens=case.drafts,
            enable_prefix_caching=False,
        ) as llm:
            return self._measure(case, llm)

    def _measure(self, case: Case, llm: LLM) -> Row:
        from absorbed_mla import SamplingParams

        llm.wake()
        params = SamplingParams(max_tokens=self.args.tokens, temperature=0)
        prompts, rates = self.prompts[: case.requests], []
        # Kernels are compiled in the first.
        for i in range(self.args.rounds + 1):
            before = dataclasses.replace(llm.statistics())
            start = self._clock()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens = [output.outputs[0].token_ids for output in outputs]
            if i:
                rates.append(sum(map(len, tokens)) / (self._clock() - start))
        done = llm.statistics()
        rate = statistics.median(rates)
        plain_rate, plain = self._plain.setdefault(case.requests, (rate, tokens))
        equal = statistics.mean(a == b for a, b in zip(tokens, plain))
        wrong = self.args.parity and equal < 1
        drafted = done.drafted - before.drafted
        return Row(
            case,
            error="the tokens differ from those without drafts" if wrong else "",
            tokens_per_second=rate,
            speedup=rate / plain_rate,
            accepted=(done.accepted - before.accepted) / drafted if drafted else None,
            equal=equal,
            steps=done.steps - before.steps,
        )

    def _clock(self) -> float:
        self.processes.synchronize()
        return time.perf_counter()

    def exit_code(self, report: Report) -> int:
        """1 if a case failed."""
        return int(any(row.error for row in report.rows))


def _texts() -> list[bytes]:
    """Files of the standard library in a fixed order that mixes them; the first are held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    found = [path.read_bytes() for path in files]
    large = [text for text in found if len(text) > 4 * PROMPT]
    # Every seventh, then the next ones: neighbours are alike.
    return [large[i] for start in range(7) for i in range(start, len(large), 7)]


def build(args: argparse.Namespace, processes) -> GPTModel:
    """A model with as many MTP layers as tokens are drafted at most."""
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.layers import mla_config
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
    from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec

    config = mla_config(
        args,
        processes,
        processes.dtype,
        num_layers=args.num_layers,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.heads,
        rotary_scaling_factor=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=True,
        mtp_num_layers=max(DRAFTS),
        mtp_loss_scaling_factor=0.3,
        gated_linear_unit=True,
        bias_activation_fusion=False,
    )
    backend = config.transformer_impl
    options = AbsorbedMLAOptions(batch_invariant=args.parity)
    spec = get_absorbed_mla_decoder_block_spec(config, backend=backend, options=options)
    drafting = get_absorbed_mla_mtp_block_spec(config, backend=backend, options=options)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        mtp_block_spec=drafting,
        vocab_size=VOCABULARY,
        max_sequence_length=PROMPT + args.tokens,
        position_embedding_type="rope",
    )
    return model.to(processes.device, processes.dtype)


def train(
    model: GPTModel, texts: Sequence[bytes], args: argparse.Namespace, processes
) -> list[float]:
    """Train on windows of the texts with AdamW; returns the loss of every step, nats per byte."""
    import torch

    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed)
    # Masters in fp32, because small updates of bf16 weights are lost.
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=6e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 6e-4, total_steps=max(args.train_iters, 2), pct_start=0.1
    )
    losses: list[float | Tensor] = []
    model.train()
    for _ in range(args.train_iters):
        starts = torch.randint(
            len(data) - args.train_length - 1, (args.train_batch,), generator=generator
        )
        rows = torch.stack([data[i : i + args.train_length + 1] for i in starts.tolist()])
        rows = rows.long().to(processes.device)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(args.train_length, device=tokens.device).expand_as(tokens)
        loss = model(tokens, positions, None, labels=labels).float().mean()
        loss.backward()
        for master, weight in zip(masters, model.parameters()):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters()):
                weight.copy_(master)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    leave(SpeculativeBenchmark.main())
