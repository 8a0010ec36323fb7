#!/usr/bin/env python3
"""Speculative decoding with MTP layers: are the tokens the same, and how much faster do they come?

    $ python scripts/benchmarks/speculative.py --json docs/measurements/inference/speculative.json

A model with two multi-token-prediction (MTP) layers is trained on the bytes of Python's standard
library, so that drafts are right as often as a small model's are. Then the live model continues
files that it has not seen, greedily, through ``LLM.from_model`` with 0, 1 and 2 drafts, in turn and
repeatedly; rates are medians of generated tokens per second, prefill included. With --parity the
tokens must be equal to the bit; otherwise products of other shapes round differently, and the share
of equal requests is reported. Output:

    60.1 s  1 requests, 2 drafts: tokens_per_second 310, speedup 1.71, accepted 0.64, equal 1

The exit code is 1 if tokens differ in parity mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.generating import GeneratingBenchmark, config_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from absorbed_mla import LLM

torch: Any = kit.lazy("torch")
DRAFTS = (0, 1, 2)
# Bytes, and what pads the embedding to a multiple of 64.
VOCABULARY = 320
PROMPT = 256


@dataclass(frozen=True)
class DraftCase(kit.Case):
    """Requests that run together."""

    text = "{requests} requests, {drafts} drafts"
    requests: int  # their number
    drafts: int  # tokens that are drafted per request and step


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What one case did."""

    case: DraftCase
    tokens_per_second: float | None = None  # median over the rounds
    speedup: float | None = None  # over the same requests without drafts
    accepted: float | None = None  # share of the drafts that were right
    equal: float | None = None  # share of requests with the tokens that they have without drafts
    steps: int | None = None  # forward passes of one round


class SpeculativeBenchmark(GeneratingBenchmark):
    """All cases over one trained model, on one device."""

    report = kit.Report.of(Row)
    options = kit.declare(
        "json render device seed=1234",
        batches=kit.sizes("numbers of requests", "1,8,32"),
        tokens=kit.number("to generate for each request", 256),
        rounds=kit.number("measurements of each case", 3),
        parity=kit.flag("parity mode, which allows no different tokens"),
        train_iters=kit.number("training steps", 400),
        train_batch=kit.number("sequences of a training step", 16),
        train_length=kit.number("bytes of a sequence", 1024),
        num_layers=kit.number("decoder layers of the model", 12),
        heads=kit.number("attention heads of each layer", 16),
        ffn_hidden_size=kit.number("width of the MLP", 6144),
        dims={**kit.DIMS, "hidden-size": 2048},
    )
    quick = "--train-iters 2 --train-batch 2 --train-length 64 --batches 1,2 --tokens 12 --rounds 1"
    recorded = ("dims", "parity", "train_iters", "tokens")

    def prepare(self) -> None:
        """The trained model."""
        super().prepare()
        from absorbed_mla.batch_invariant import enable_batch_invariant_mode

        args = self.args
        if args.parity:
            enable_batch_invariant_mode(self.processes.device.type)
        texts = _texts()
        self.prompts = [list(text[:PROMPT]) for text in texts[: max(args.batches)]]
        self._model = build_with_mtp(args, self.processes)
        self.losses = train(self._model, texts[max(args.batches) :], args, self.processes)
        self._plain: dict[int, tuple[float, list[list[int]]]] = {}

    def about(self) -> dict:
        """With how well the model predicts."""
        last = statistics.mean(self.losses[-10:])
        losses = {"first_loss": self.losses[0], "last_loss": last}
        return super().about() | losses | {"prompt": PROMPT}

    def cases(self) -> list[DraftCase]:
        """Without drafts first."""
        return [DraftCase(number, drafts) for number in self.args.batches for drafts in DRAFTS]

    def measure(self, case: DraftCase) -> Row:
        """Measure one case."""
        from absorbed_mla import LLM

        with LLM.from_model(
            self._model,
            max_num_seqs=case.requests,
            max_model_len=PROMPT + self.args.tokens,
            num_speculative_tokens=case.drafts,
            enable_prefix_caching=False,
        ) as llm:
            return self._measure(case, llm)

    def _measure(self, case: DraftCase, llm: LLM) -> Row:
        from absorbed_mla import SamplingParams

        llm.wake()
        params = SamplingParams(max_tokens=self.args.tokens, temperature=0)
        prompts, rates = self.prompts[: case.requests], []
        # Kernels are compiled in the first.
        for i in range(self.args.rounds + 1):
            before = dataclasses.replace(llm.statistics())
            start = self.clock()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens = [output.outputs[0].token_ids for output in outputs]
            if i:
                rates.append(sum(map(len, tokens)) / (self.clock() - start))
        done = llm.statistics()
        rate = statistics.median(rates)
        plain_rate, plain = self._plain.setdefault(case.requests, (rate, tokens))
        equal = statistics.mean(a == b for a, b in zip(tokens, plain))
        wrong = self.args.parity and equal < 1
        drafted = done.drafted - before.drafted
        return Row(
            case=case,
            error="the tokens differ from those without drafts" if wrong else "",
            tokens_per_second=rate,
            speedup=rate / plain_rate,
            accepted=(done.accepted - before.accepted) / drafted if drafted else None,
            equal=equal,
            steps=done.steps - before.steps,
        )


def _texts() -> list[bytes]:
    """Files of the standard library in a fixed order that mixes them; the first are held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    found = [path.read_bytes() for path in files]
    large = [text for text in found if len(text) > 4 * PROMPT]
    # Every seventh, then the next ones: neighbours are alike.
    return [large[i] for start in range(7) for i in range(start, len(large), 7)]


def build_with_mtp(args: argparse.Namespace, processes: Any) -> GPTModel:
    """A model with as many MTP layers as tokens are drafted at most."""
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla import AbsorbedMLAOptions
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
    from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec

    mtp = {"mtp_num_layers": max(DRAFTS), "mtp_loss_scaling_factor": 0.3}
    config = config_of(args, processes, processes.dtype, **mtp)
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
    kit.main(SpeculativeBenchmark)
