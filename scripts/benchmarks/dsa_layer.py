#!/usr/bin/env python3
r"""Measure a training step of an attention layer with DeepSeek Sparse Attention beside others.

    $ python scripts/benchmarks/dsa_layer.py --json docs/dsa/layer.json
    $ python scripts/benchmarks/dsa_layer.py --seq-lens 32k --works sparse,dense
    $ python scripts/benchmarks/dsa_layer.py --device cpu --heads 2 --seq-lens 32 --hidden-size 32 \
          --q-lora-rank 16 --kv-lora-rank 32 --qk-head-dim 8 --qk-pos-emb-head-dim 8 \
          --v-head-dim 8 --topk 8 --indexer-heads 2 --indexer-dim 16 --seconds-per-row 0.01
    $ python scripts/benchmarks/dsa_layer.py --render docs/dsa/layer.json

One whole layer, forward and backward, DeepSeek-V3.2's widths, in turns over the same input:

    sparse              our sparse layer with the fastest backends
    warm-up             the same with a top-k above the sequence, all but its indexer frozen
    dense               our dense layer with the fastest
    slot                Megatron's DSAttention in the core slot of our layer
    megatron            Megatron's layer, in plain PyTorch
    megatron-tilelang   with the kernels of dsa_kernel_backend="tilelang"
    megatron-cudnn      with those of "cudnn" and FlashMLA

"sparse" and "slot" have the same weights; the difference of their outputs is shown. GiB is what a
step allocates at most beside weights and input. The indexer
learns from the chosen keys, unless --loss-coefficient is 0. Hadamard transforms are off: Megatron
needs a package for them. What cannot run has the reason in its row. Output:

    1.9 s  n=128 S=8192: sparse 31250.0 us, dense 40210.5 us

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.fusions import FusionsReport
from benchmarks.fusions import Row as FusionsRow
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.run import Benchmark
from benchmarks.together import Work, measure_together
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor, nn

WORKS = ("sparse", "warm-up", "dense", "slot", "megatron", "megatron-tilelang", "megatron-cudnn")


@dataclass(frozen=True)
class Case:
    """Heads and tokens of a layer."""

    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"n={self.heads} S={self.tokens}"


@dataclass(frozen=True, kw_only=True)
class Row(FusionsRow):
    """The layers of one size."""

    case: Case


class DSALayerReport(FusionsReport):
    """One run."""

    row = Row


class DSALayerBenchmark(Benchmark):
    """All layers of one size in turns."""

    script = "dsa_layer.py"
    report = DSALayerReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, render=None, json=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, heads="128", seconds_per_row=2.0, time_limit=120.0)
        works = list_of(one_of(WORKS))
        add("--works", type=works, default=",".join(WORKS), help="layers to measure, see above")
        add("--seq-lens", type=parse_sizes, default="8k,32k,64k", help="tokens of the sequence")
        add("--topk", type=arguments.count, default=2048, help="keys that a query attends to")
        add("--indexer-heads", type=arguments.count, default=64, help="heads of the indexer")
        add("--indexer-dim", type=arguments.count, default=128, help="width of one of them")
        text = "of the indexer's loss; 0 for a step without it"
        add("--loss-coefficient", type=float, default=1.0, help=text)
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With all that the layers have in common."""
        args = self.args
        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims=dims_of(args),
            indexer=[args.indexer_heads, args.indexer_dim],
            topk=args.topk,
            loss_coefficient=args.loss_coefficient,
        )

    def cases(self) -> list[Case]:
        """Short sequences first."""
        found = [Case(n, tokens) for tokens in sorted(self.args.seq_lens) for n in self.args.heads]
        return arguments.chosen(found, self.args.only)

    def measure(self, case: Case) -> Row:
        """The layers of one size."""
        processes = self.processes
        x = processes.random(case.tokens, 1, self.args.hidden_size)
        grad = processes.random(case.tokens, 1, self.args.hidden_size)
        state: dict[str, Tensor] = {}
        works = [
            Work.attempt(name, lambda name=name: self._work(name, case, x, grad, state))
            for name in self.args.works
        ]
        return Row(case=case, works=measure_together(works, processes, self.args.seconds_per_row))

    def _work(
        self, name: str, case: Case, x: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Work:
        """One of :data:`WORKS`; ``state`` has the weights of the first sparse layer."""
        from benchmarks.kit.layers import Subject

        layer = self._layer(name, case).to(self.processes.device)
        compared = name in ("sparse", "slot")
        if compared:
            _share_weights(layer, state)
        frozen = name == "warm-up"
        if frozen:
            for parameter_name, parameter in layer.named_parameters():
                parameter.requires_grad_(".indexer." in parameter_name)
        subject = Subject(layer.train(), x.clone().requires_grad_(not frozen), grad, None)
        return Work(
            name,
            subject.forward,
            subject.backward,
            (lambda out: (out,)) if compared else None,
            subject.forget_gradients,
        )

    def _layer(self, name: str, case: Case) -> nn.Module:
        from megatron.core.transformer.spec_utils import build_module

        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit.layers import attention_spec

        config = self._config(name, case)
        if name.startswith("megatron"):
            spec = _megatron_spec(config)
        else:
            spec = attention_spec(config, AbsorbedMLAOptions())
        if name == "slot":
            spec = _with_their_core(spec, config)
        return build_module(spec, config=config, layer_number=1, cp_comm_type=config.cp_comm_type)

    def _config(self, name: str, case: Case) -> Any:
        from benchmarks.kit.layers import mla_config

        args = self.args
        sparse = {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": args.indexer_heads,
            "dsa_indexer_head_dim": args.indexer_dim,
            "dsa_indexer_topk": case.tokens if name == "warm-up" else args.topk,
            "dsa_indexer_loss_coeff": args.loss_coefficient,
            "dsa_indexer_use_sparse_loss": name != "warm-up",
            "dsa_indexer_rotate_activation": False,
            "dsa_kernel_backend": name.partition("megatron-")[2] or "none",
            "cp_comm_type": "allgather",
        }
        return mla_config(
            args,
            self.processes,
            self.processes.dtype,
            num_layers=1,
            ffn_hidden_size=args.hidden_size,
            num_attention_heads=case.heads,
            rotary_scaling_factor=40,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
            **(sparse if name != "dense" else {}),
        )


def _share_weights(layer: nn.Module, state: dict[str, Tensor]) -> None:
    """Keep the weights of the first layer in ``state``, and copy them to the next ones."""
    import torch

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            # Megatron's core attention is a level further down.
            name = name.replace("core_attention.attention.", "core_attention.")
            parameter.copy_(state.setdefault(name, parameter.detach()))


def _megatron_spec(config: Any) -> Any:
    """Of Megatron's own layer."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    return specs.get_experimental_attention_variant_module_spec(config)


def _with_their_core(spec: Any, config: Any) -> Any:
    """Our layer around Megatron's core attention."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from absorbed_mla.testing.megatron_core_attention import (
        MegatronCoreAttention,
        MegatronCoreAttentionSubmodules,
    )

    theirs = _megatron_spec(config).submodules.core_attention
    core = ModuleSpec(MegatronCoreAttention, submodules=MegatronCoreAttentionSubmodules(theirs))
    submodules = dataclasses.replace(spec.submodules, core_attention=core)
    return dataclasses.replace(spec, submodules=submodules)


if __name__ == "__main__":
    leave(DSALayerBenchmark.main())
