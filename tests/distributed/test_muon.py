"""Megatron's Muon on whole models: updates of both attentions, in every mode of tensor parallelism.

Both models get the same weights and gradients, so that what differs is the update alone. If these
fail, training with Muon is not what it is with standard MLA, and nothing says so.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.muon.rank_pairs import RankPairs
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.distributed.whole import shared_folder
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.fake_packages import emerging_optimizers
from tests.support.models import gpt_model
from tests.support.numerics import relative_error
from tests.support.standard import KV_UP, interleave_heads, separate_heads

# Widths of K and V are equal in DeepSeek's models; tests/unit/attention has others.
MLA = replace(TINY, v=TINY.nope)
MODES = ("blockwise", "duplicated", "distributed")
K_UP, V_UP = "linear_k_up_proj.weight", "linear_v_up_proj.weight"
LAYERS = {"num_layers": 2, "layernorm_epsilon": MLA.norm_eps}
NOT_INSTALLED = "needs NVIDIA's emerging_optimizers, of Python 3.12"
pytestmark = needs.processes(1, 2)


@pytest.fixture(
    autouse=True,
    params=[
        "stand_in",
        pytest.param(
            "installed",
            marks=pytest.mark.skipif(not emerging_optimizers.IS_INSTALLED, reason=NOT_INSTALLED),
        ),
    ],
)
def package(request, monkeypatch) -> None:
    """What Megatron's Muon takes its iteration and its base class from."""
    if request.param == "stand_in":
        emerging_optimizers.install(monkeypatch)


@dataclass
class Training:
    """A model whose gradients are given, and Megatron's optimizer of it."""

    model: nn.Module
    optimizer: MegatronOptimizer | None = None

    @classmethod
    def of(
        cls,
        choice: str | None,
        mode: str,
        dtype: torch.dtype = torch.float32,
        clip_grad: float = 0.0,
        layer_wise: bool = False,
    ) -> Training:
        """With the absorbed attention under a choice of ``muon_kv_up``, or the standard one."""
        changes = {**LAYERS, "tensor_model_parallel_size": world.tp_size()}
        spec = None
        if choice is not None:
            config = config_for(MLA, dtype, **changes)
            options = AbsorbedMLAOptions(muon_kv_up=choice, down_projection="column_parallel")
            spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
        model = gpt_model(
            "absorbed" if choice else "standard", MLA, dtype=dtype, spec=spec, **changes
        )
        model = distributed(model, layer_wise)
        config = OptimizerConfig(
            optimizer="muon",
            lr=0.1,
            weight_decay=0.1,
            muon_tp_mode=mode,
            muon_nesterov=True,
            muon_fp32_matmul_prec="highest",
            clip_grad=clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_layer_wise_distributed_optimizer=layer_wise,
            use_distributed_optimizer=layer_wise,
        )
        training = cls(model)
        training.set("weight", {name: p.data for name, p in training.parameters()})
        training.optimizer = get_megatron_optimizer(config, [model])
        return training

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name.split("module.")[-1], p) for name, p in self.model.named_parameters()]

    def set(self, what: str, tensors: dict[str, Tensor]) -> None:
        """Fill tensors named as parameters with values that every model has in common."""
        for name, parameter in self.parameters():
            tensors[name].copy_(common_part(what, name, parameter))

    def step(self, number: int) -> None:
        self.set(f"gradient {number}", {name: p.main_grad for name, p in self.parameters()})
        assert self.optimizer.step()[0]
        self.optimizer.zero_grad()

    def sharded_state_dict(self, is_loading: bool = False) -> dict:
        model = self.model.module.sharded_state_dict()
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading),
        }

    def load(self, folder: Path) -> None:
        state = dist_checkpointing.load(self.sharded_state_dict(is_loading=True), str(folder))
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by the names of the standard."""
        own = {name: part.detach() for name, part in self.parameters()}
        for name in [name for name in own if name.endswith(K_UP)]:
            values = own.pop(name.replace(K_UP, V_UP))
            own[name.replace(K_UP, KV_UP)] = interleave_heads(MLA, own.pop(name), values)
        dims = {name.replace(K_UP, KV_UP): sharded_dim(p) for name, p in self.parameters()}
        return {
            name: part.clone() if dims[name] is None else world.gather(part, dims[name])
            for name, part in own.items()
        }

    def run(self, steps: int = 3) -> dict[str, Tensor]:
        """The change of every weight."""
        before = self.weights()
        for number in range(steps):
            self.step(number)
        return {name: weight - before[name] for name, weight in self.weights().items()}


def distributed(model: nn.Module, layer_wise: bool) -> DistributedDataParallel:
    """Layer-wise: every matrix's gradient and update belong to one data-parallel rank."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=layer_wise)
    layout = None
    if layer_wise:
        tag_params_for_buffer_routing([model])
        layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(model.parameters()),
            None,
            torch.distributed.get_world_size() // world.tp_size(),
            config,
        )
    return DistributedDataParallel(model.config, config, model, full_param_layout=layout)


def sharded_dim(parameter: nn.Parameter) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def common_part(what: str, name: str, parameter: nn.Parameter) -> Tensor:
    """This rank's part of a random tensor that depends on the name in the standard's model only."""
    shape, dim = list(parameter.shape), sharded_dim(parameter)
    standard = name.replace(K_UP, KV_UP).replace(V_UP, KV_UP)
    if standard != name:
        shape[0] = shape[0] // (MLA.nope if name.endswith(K_UP) else MLA.v) * (MLA.nope + MLA.v)
    if dim is not None:
        shape[dim] *= world.tp_size()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{what} {standard}".encode()))
    whole = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    if standard != name:
        whole = separate_heads(MLA, whole)[name.endswith(V_UP)]
    return whole if dim is None else world.own_part(whole, dim)


def errors_of(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert set(actual) == set(expected)
    return {name: relative_error(actual[name], expected[name]) for name in expected}


@pytest.mark.parametrize(
    "dtype, mode",
    [*((torch.float32, mode) for mode in MODES), (torch.bfloat16, "duplicated")],
    ids=[*MODES, "bf16"],
)
def test_combined_is_the_standard_update(dtype, mode):
    """Of every parameter, those included that Adam updates; in bf16 through fp32 copies."""
    standard, absorbed = (Training.of(choice, mode, dtype) for choice in (None, "combined"))
    standard.run(), absorbed.run()
    weights = absorbed.weights()
    assert sum(name.endswith(KV_UP) for name in weights) == 2
    for name, weight in standard.weights().items():
        assert torch.equal(weights[name], weight), name


def test_clipping_is_that_of_the_standard():
    """The norm is summed in another order, which the iteration makes more of."""
    standard, absorbed = (
        Training.of(choice, "duplicated", clip_grad=1.0).run() for choice in (None, "combined")
    )
    errors = errors_of(absorbed, standard)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize(
    "choice, mode",
    [("combined", "duplicated"), ("combined", "distributed"), *(("per_head", m) for m in MODES)],
)
def test_the_update_is_the_same_at_every_size(choice, mode):
    """Blockwise, Megatron's default, takes each rank's rows for a matrix, except per head.

    Distributed sums over ranks: the iteration makes up to ten times of that rounding.
    """
    parallel = Training.of(choice, mode).run()
    with world.parallel(tp=1):
        alone = Training.of(choice, mode).run()
    errors = errors_of(parallel, alone)
    assert max(errors[name] for name in errors if name.endswith(KV_UP)) < 5e-6, errors


def test_choices_differ_in_these_weights_only():
    combined, split, per_head = (
        Training.of(choice, "duplicated").run() for choice in ("combined", "split", "per_head")
    )
    for other in (split, per_head):
        errors = errors_of(other, combined)
        assert min(errors[name] for name in errors if name.endswith(KV_UP)) > 0.1, errors
        assert max(errors[name] for name in errors if not name.endswith(KV_UP)) == 0, errors


def test_a_run_of_the_standard_goes_on(folder):
    """From a distributed checkpoint: weights and momentum under the standard's names, and back."""
    standard, absorbed = (Training.of(choice, "duplicated") for choice in (None, "combined"))
    standard.run()
    dist_checkpointing.save(standard.sharded_state_dict(), str(folder))
    keys = dist_checkpointing.load_tensors_metadata(str(folder))
    assert any("state.momentum_buffer." in key and key.endswith(KV_UP) for key in keys)
    absorbed.load(folder)
    again = Training.of(None, "duplicated")
    with shared_folder() as other:
        dist_checkpointing.save(absorbed.sharded_state_dict(), str(other))
        again.load(other)
    for training in (standard, absorbed, again):
        training.step(3)
    for name, weight in standard.weights().items():
        assert torch.equal(absorbed.weights()[name], weight), name
        assert torch.equal(again.weights()[name], weight), name


@pytest.mark.parametrize("choice", [None, "combined", "per_head"])
def test_layer_wise(choice, monkeypatch):
    """Every matrix belongs to one data-parallel rank, and K and V of a layer to different ones."""
    exchanged = []
    exchange = RankPairs.exchange
    monkeypatch.setattr(
        RankPairs, "exchange", lambda *args: exchanged.append(args) or exchange(*args)
    )
    with world.parallel(tp=1):
        expected = Training.of(choice, "duplicated", torch.bfloat16).run()
        assert not exchanged
        training = Training.of(choice, "duplicated", torch.bfloat16, layer_wise=True)
        actual = training.run()
    assert bool(exchanged) == (choice == "combined" and world.size() > 1)
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name
