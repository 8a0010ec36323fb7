"""NVIDIA's emerging_optimizers, as far as Megatron-Core 0.19.2's Muon uses it, in plain PyTorch.

The package itself wants Python 3.12. Where it is installed, the tests run with it as well.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tests.support.muon import QUINTIC

NAME = "emerging_optimizers"
MEGATRON = "megatron.core.optimizer"
IS_INSTALLED = importlib.util.find_spec(NAME) is not None


def newton_schulz_tp(
    x: Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: dist.ProcessGroup | None,
    partition_dim: int | None = None,
    tp_mode: str = "duplicated",
) -> Tensor:
    """The iteration on a matrix of which every rank has a part, or all if there is no dim."""
    assert coefficient_type == "quintic" and x.dtype == torch.float32
    if partition_dim is None:
        return _iterate(x, steps, tall=x.shape[0] > x.shape[1])
    if tp_mode == "distributed":
        return _iterate(x, steps, tall=partition_dim == 0, group=tp_group)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x.contiguous(), tp_group)
    whole = torch.cat(parts, partition_dim)
    whole = _iterate(whole, steps, tall=whole.shape[0] > whole.shape[1])
    return whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]


def _iterate(x: Tensor, steps: int, tall: bool, group: dist.ProcessGroup | None = None) -> Tensor:
    a, b, c = QUINTIC
    wide = x.mT if tall else x
    wide = wide / _summed((wide * wide).sum(), group).sqrt().clamp_min(1e-7)
    for _ in range(steps):
        gram = _summed(wide @ wide.mT, group)
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if tall else wide


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Depends on the shape of the matrix that is orthogonalised."""
    assert mode == "spectral"
    return max(size_out, size_in) ** 0.5


class OrthogonalizedOptimizer(Optimizer):
    """Steps by what the subclass's ``orthogonalize(p, momentum)`` returns."""

    def __init__(
        self,
        params,
        lr: float,
        momentum: float,
        weight_decay: float,
        *,
        nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn,
    ) -> None:
        assert weight_decay_method == "decoupled" and fp32_matmul_prec == "highest"
        self.nesterov, self.scaled_orthogonalize_fn = nesterov, scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group: dict, skip_non_grad_params: bool = True) -> None:
        for p in group["params"]:
            if not (p.grad is None and skip_non_grad_params) and not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.data)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """An average of gradients, orthogonalised."""
        assert closure is None
        for group in self.param_groups:
            self._init_group(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                average, kept = self.state[p]["momentum_buffer"], group["momentum"]
                average.mul_(kept).add_(p.grad, alpha=1 - kept)
                ahead = kept * average + (1 - kept) * p.grad if self.nesterov else average
                others = {name: value for name, value in group.items() if name != "params"}
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self.orthogonalize(p, ahead, **others))


def _modules() -> dict[str, dict]:
    """What Megatron imports, by module."""

    class AdaptiveMuon(OrthogonalizedOptimizer):
        pass

    class Registry:
        get_optimizer_name_list = staticmethod(list)

    orthogonalized = {
        "AdaptiveMuon": AdaptiveMuon,
        "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
        "get_muon_scale_factor": get_muon_scale_factor,
    }
    newton_schulz = {"NSCoeffT": Literal["quintic"], "newton_schulz_tp": newton_schulz_tp}
    return {
        NAME: {"registry": Registry},
        f"{NAME}.orthogonalized_optimizers": orthogonalized,
        f"{NAME}.orthogonalized_optimizers.muon_utils": newton_schulz,
        f"{NAME}.scalar_optimizers": {"Lion": Optimizer},
        f"{NAME}.soap": {"SOAP": Optimizer},
    }


def install(monkeypatch) -> None:
    """Have Megatron's optimizers, imported anew, use this in place of the package."""
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        monkeypatch.delitem(sys.modules, name)
    for name, content in _modules().items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    megatron = importlib.import_module(MEGATRON)
    former = importlib.import_module(f"{MEGATRON}.{NAME}")
    monkeypatch.delitem(sys.modules, f"{MEGATRON}.{NAME}")
    anew = importlib.import_module(f"{MEGATRON}.{NAME}")
    monkeypatch.setitem(sys.modules, f"{MEGATRON}.{NAME}", anew)
    # The import has put it there, for good.
    megatron.emerging_optimizers = former
    monkeypatch.setattr(megatron, NAME, anew)
    for name, value in vars(former).items():
        if vars(megatron).get(name) is value:
            monkeypatch.setattr(megatron, name, vars(anew)[name])
