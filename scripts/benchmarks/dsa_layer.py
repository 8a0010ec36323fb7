#!/usr/bin/env python3
"""Measure a training step of an attention layer with DeepSeek Sparse Attention beside others.

    $ python scripts/benchmarks/dsa_layer.py --json docs/measurements/dsa/layer.json
    $ python scripts/benchmarks/dsa_layer.py --seq-lens 32k --works sparse,dense
    $ python scripts/benchmarks/dsa_layer.py --render docs/measurements/dsa/layer.json

One whole layer, forward and backward, DeepSeek-V3.2's widths, in turns over the same input:

    sparse              our sparse layer with the fastest backends
    warm-up             the same with a top-k above the sequence, all but its indexer frozen
    dense               our dense layer with the fastest
    slot                Megatron's DSAttention in the core slot of our layer
    megatron            Megatron's layer, in plain PyTorch
    megatron-tilelang   with the kernels of dsa_kernel_backend="tilelang"
    megatron-cudnn      with those of "cudnn" and FlashMLA

"sparse" and "slot" have the same weights; the difference of their outputs is shown. GiB is what a
step allocates at most beside weights and input. The indexer learns from the chosen keys, unless
--loss-coefficient is 0. Hadamard transforms are off: Megatron needs a package for them. Output:

    1.9 s  n=128 S=8192: sparse 31250.0 us, dense 40210.5 us
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.works import Work, WorksBenchmark, WorksReport, WorksRow, attempts

if TYPE_CHECKING:
    from torch import Tensor, nn

torch: Any = kit.lazy("torch")
WORKS = ("sparse", "warm-up", "dense", "slot", "megatron", "megatron-tilelang", "megatron-cudnn")


@dataclass(frozen=True)
class LayerCase(kit.Case):
    """Heads and tokens of a layer."""

    text = "n={heads} S={tokens}"
    heads: int
    tokens: int


DSALayerReport = WorksReport.of(kit.row_of(LayerCase, WorksRow))


class DSALayerBenchmark(WorksBenchmark):
    """All layers of one size in turns."""

    report = DSALayerReport
    options = kit.declare(
        "json render only device heads=128 seq_lens=8k,32k,64k seconds_per_row=2 "
        "time_limit=120 seed=1234",
        works=kit.some("layers to measure, see above", WORKS),
        topk=kit.number("keys that a query attends to", 2048),
        indexer_heads=kit.number("heads of the indexer", 64),
        indexer_dim=kit.number("width of one of them", 128),
        loss_coefficient=kit.Option("of the indexer's loss; 0 for a step without it", float, 1.0),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 32 --topk 8 --indexer-heads 2 --indexer-dim 16"
    recorded = ("dims", "topk", "loss_coefficient")

    def about(self) -> dict:
        """With the sizes of the indexer."""
        return super().about() | {"indexer": [self.args.indexer_heads, self.args.indexer_dim]}

    def cases(self) -> list[LayerCase]:
        """Short sequences first."""
        sizes = sorted(self.args.seq_lens)
        return [LayerCase(heads, tokens) for tokens in sizes for heads in self.args.heads]

    def works(self, case: LayerCase) -> list[Work]:
        """See above."""
        x, grad = (self.processes.random(case.tokens, 1, self.args.hidden_size) for _ in range(2))
        # Of the first sparse layer.
        state: dict[str, Tensor] = {}
        names = self.args.works
        return attempts({n: partial(self._work, n, case, x, grad, state) for n in names})

    def _work(
        self, name: str, case: LayerCase, x: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Work:
        from benchmarks.kit.layers import Subject

        layer = self._layer(name, case).to(self.processes.device)
        compared, frozen = name in ("sparse", "slot"), name == "warm-up"
        if compared:
            _share_weights(layer, state)
        if frozen:
            for parameter_name, parameter in layer.named_parameters():
                parameter.requires_grad_(".indexer." in parameter_name)
        subject = Subject(layer.train(), x.clone().requires_grad_(not frozen), grad, None)
        return subject.work(compared=compared)

    def _layer(self, name: str, case: LayerCase) -> nn.Module:
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

    def _config(self, name: str, case: LayerCase) -> Any:
        from benchmarks.kit.layers import YARN, mla_config

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
            **YARN,
            **(sparse if name != "dense" else {}),
        )


def _share_weights(layer: nn.Module, state: dict[str, Tensor]) -> None:
    """Keep the weights of the first layer in ``state``, and copy them to the next ones."""
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
    kit.main(DSALayerBenchmark)
