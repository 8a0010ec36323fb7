"""Run the attention on whole weights at any parallel layout, and gather whole gradients."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.lora import LoRAConfig, add_lora
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec
from tests.oracle import OracleMLA, OracleResult, Table
from tests.support import world
from tests.support.cases import config_for, model_options, random_weights
from tests.support.layouts import Layout, cut_tokens
from tests.support.numerics import Deviation

# Oracle name -> names of the parameter (TransformerEngine may fuse a norm into what follows it),
# and the dim it is sharded over; "down" is dim 0 if the down-projections are column-parallel.
PARAMETERS: dict[str, tuple[tuple[str, ...], int | str | None]] = {
    "w_q": (("linear_q_proj.weight",), 0),
    "w_dq": (("linear_q_down_proj.weight",), "down"),
    "w_uq": (("linear_q_up_proj.weight",), 0),
    "w_dkv": (("linear_kv_down_proj.weight",), "down"),
    "w_uk": (("linear_k_up_proj.weight",), 0),
    "w_uv": (("linear_v_up_proj.weight",), 0),
    "w_o": (("linear_proj.weight",), 1),
    "q_norm": (("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"), None),
    "kv_norm": (("kv_layernorm.weight",), None),
    "sinks": (("core_attention.softmax_offset",), 0),
    "k_rope_norm": (("k_rope_layernorm.weight",), None),
    "w_gate": (("linear_gate.weight",), 0),
    # Of an indexer (tests.oracle_dsa).
    "i_wq": (("core_attention.indexer.linear_wq_b.weight",), None),
    "i_wk": (("core_attention.indexer.linear_wk.weight",), None),
    "i_k_gain": (("core_attention.indexer.k_norm.weight",), None),
    "i_k_bias": (("core_attention.indexer.k_norm.bias",), None),
    "i_w": (("core_attention.indexer.linear_weights_proj.weight",), None),
}
# Their LoRA: A is sharded where the layer's inputs are, B where its outputs are.
for _name in ("w_q", "w_dq", "w_uq", "w_dkv", "w_uk", "w_uv", "w_o"):
    (_layer,), _dim = PARAMETERS[_name]
    _lora = f"lora.{_layer.removesuffix('weight')}"
    PARAMETERS[f"{_name}.A"] = ((f"{_lora}lora_A.weight",), 1 if _dim == 1 else None)
    PARAMETERS[f"{_name}.B"] = ((f"{_lora}lora_B.weight",), None if _dim == 1 else _dim)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way of executing the layer; fields of ``AbsorbedMLAOptions`` have their names."""

    sequence_parallel: bool = False
    down_projection: str = "duplicated"
    form: str = "absorbed"
    recompute: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    backend: str = "local"
    core_attention_backend: str = "auto"
    cp_comm_type: str | None = None
    # Smaller than the sequences of the tests, so that there are several chunks.
    query_chunk_size: int = 4
    expansion_chunk_size: int = 60
    context_chunk_size: int = 5
    paged_attention_backend: str = "auto"
    latent_cache_tokens: int | None = None
    latent_cache_dtype: str = "model"
    train_on_cached_latents: bool = False
    batch_invariant: bool = False
    sparse_attention_backend: str = "auto"
    indexer_backend: str = "auto"
    # Linear layers of TransformerEngine in FP8, with these scales; and their parameters, too.
    fp8_recipe: str | None = None
    fp8_param: bool = False
    mask_type: AttnMaskType = AttnMaskType.causal

    def describe(self) -> dict[str, object]:
        """The columns of the error table that describe this setup."""
        names = ("sequence_parallel", "down_projection", "form", "recompute", "dtype", "backend")
        columns = {n: getattr(self, n) for n in (*names, "core_attention_backend", "cp_comm_type")}
        columns["recompute"] = "+".join(self.recompute) or "none"
        return columns | {"dtype": str(self.dtype).removeprefix("torch.")}


def build_attention(mla: OracleMLA, setup: Setup, **config_changes) -> nn.Module:
    """The attention straight from the layer spec, on this process's device, in training mode."""
    changes = {
        "tensor_model_parallel_size": world.tp_size(),
        "context_parallel_size": world.cp_size(),
        "sequence_parallel": setup.sequence_parallel,
        "transformer_impl": setup.backend,
        **config_changes,
    }
    if setup.fp8_recipe:
        changes |= {"fp8": "hybrid", "fp8_recipe": setup.fp8_recipe, "fp8_param": setup.fp8_param}
        changes["use_cpu_initialization"] = not setup.fp8_param
    if setup.recompute:
        changes["recompute_granularity"] = "selective"
        changes["recompute_modules"] = list(setup.recompute)
    config = config_for(mla, setup.dtype, **changes)
    of_layer = {field.name for field in dataclasses.fields(AbsorbedMLAOptions)}
    chosen = {name: value for name, value in vars(setup).items() if name in of_layer}
    options = AbsorbedMLAOptions(latent_norm_eps=mla.norm_eps, **model_options(mla), **chosen)
    spec = get_absorbed_mla_layer_spec(config, backend=setup.backend, options=options)
    spec = spec.submodules.self_attention
    spec = dataclasses.replace(spec, params={**spec.params, "attn_mask_type": setup.mask_type})
    with get_fp8_context(config, is_init=True):
        attention = build_module(
            spec, config=config, layer_number=1, cp_comm_type=setup.cp_comm_type
        )
    if getattr(mla, "lora", ()):
        names = [PARAMETERS[name][0][0].removesuffix(".weight") for name in mla.lora]
        r, alpha = mla.lora_rank, mla.lora_rank * mla.lora_scale
        add_lora(attention, LoRAConfig(r=r, lora_alpha=alpha, target_modules=names))
    return attention.to(world.device())


def random_attention(mla: OracleMLA, setup: Setup, **config_changes) -> nn.Module:
    """:func:`build_attention` with this rank's part of ``random_weights``."""
    attention = build_attention(mla, setup, **config_changes)
    load_weights(attention, mla, setup, random_weights(mla))
    return attention


def parameters_by_oracle_name(attention: nn.Module, mla: OracleMLA) -> dict[str, nn.Parameter]:
    """The module's parameters; fails unless they are exactly the weights of the oracle."""
    found = dict(attention.named_parameters())
    named = {}
    for oracle_name in mla.weight_shapes():
        candidates = [n for n in PARAMETERS[oracle_name][0] if n in found]
        if len(candidates) != 1:
            raise AssertionError(f"{oracle_name}: {PARAMETERS[oracle_name][0]} not in {[*found]}")
        named[oracle_name] = found.pop(candidates[0])
    if found:
        raise AssertionError(f"parameters that the oracle does not have: {[*found]}")
    return named


def shard_dim(oracle_name: str, setup: Setup) -> int | None:
    """The dimension along which a weight is sharded; None if every rank has all of it."""
    dim = PARAMETERS[oracle_name][1]
    if dim == "down":
        return 0 if setup.down_projection == "column_parallel" else None
    return dim


def rank_weights(setup: Setup, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of every whole weight, by oracle name."""
    dims = {name: shard_dim(name, setup) for name in weights}
    return {
        name: weight if dims[name] is None else world.own_part(weight, dims[name])
        for name, weight in weights.items()
    }


def load_weights(
    attention: nn.Module, mla: OracleMLA, setup: Setup, weights: dict[str, Tensor]
) -> None:
    """Copy this rank's part of every whole weight into the module."""
    parts = rank_weights(setup, weights)
    for name, parameter in parameters_by_oracle_name(attention, mla).items():
        part = parts[name]
        if parameter.shape != part.shape:
            raise AssertionError(f"{name}: {tuple(parameter.shape)}, not {tuple(part.shape)}")
        with torch.no_grad():
            parameter.copy_(part.to(parameter.device, parameter.dtype))


def run(
    attention: nn.Module,
    mla: OracleMLA,
    setup: Setup,
    layout: Layout,
    x: Tensor,
    output_grad: Tensor,
    attention_mask: Tensor | None = None,
    cp: dict[str, object] | None = None,
) -> OracleResult:
    """Forward and backward on whole ``x`` and ``output_grad`` [tokens, batch, hidden].

    ``cp`` has fields of ``packed_seq_params`` that select the context parallelism of this call.

    Returns:
        Whole output and gradients, as this rank sees them, rows [tokens * batch, hidden].
    """
    group = cp_group_of_call(cp)
    x, output_grad = (own_tokens(t, layout, setup, group) for t in (x, output_grad))
    x = x.detach().clone().requires_grad_()
    packed = layout.packed_seq_params(world.device())
    if cp:
        packed = dataclasses.replace(packed or PackedSeqParams(qkv_format="sbhd"), **cp)
    if attention_mask is not None:
        attention_mask = attention_mask.to(world.device())
    with get_fp8_context(attention.config):
        output, bias = attention(x, attention_mask, packed_seq_params=packed)
    if bias is not None or output.dtype != setup.dtype or output.shape != x.shape:
        raise AssertionError(f"bias {bias}, output {output.dtype} {tuple(output.shape)}")
    output.backward(output_grad)
    output, input_grad = (all_tokens(t, layout, setup, group) for t in (output.detach(), x.grad))
    gradients = whole_gradients(parameters_by_oracle_name(attention, mla), setup, group)
    gradients = {name: gradient.cpu() for name, gradient in gradients.items()}
    return OracleResult(
        output.reshape(-1, mla.hidden).cpu(), input_grad.reshape(-1, mla.hidden).cpu(), gradients
    )


def cp_group_of_call(cp: dict[str, object] | None) -> dist.ProcessGroup:
    """The context-parallel ranks of a call with these fields of ``packed_seq_params``."""
    if not cp:
        return world.cp_group()
    groups = parallel_state.get_hybrid_data_context_parallel_groups
    return cp.get("cp_group") or groups(group_size=cp["local_cp_size"])


def own_tokens(x: Tensor, layout: Layout, setup: Setup, group: dist.ProcessGroup) -> Tensor:
    """This process's part of whole ``x`` [tokens, batch, ...], on its device."""
    cut = cut_tokens(layout, group.size(), group.rank())
    x = x[cut].to(world.device(), setup.dtype)
    return world.own_part(x, 0) if setup.sequence_parallel else x


def all_tokens(x: Tensor, layout: Layout, setup: Setup, group: dist.ProcessGroup) -> Tensor:
    """The inverse of :func:`own_tokens`, on every process."""
    if setup.sequence_parallel:
        x = world.gather(x, 0)
    x = world.gather(x, 0, group)
    order = [t for rank in range(group.size()) for t in cut_tokens(layout, group.size(), rank)]
    return x[torch.tensor(order, device=x.device).argsort()]


def whole_gradients(
    parameters: dict[str, nn.Parameter], setup: Setup, cp_group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Whole gradients as the optimizer sees them after Megatron's finalize_model_grads.

    That function sums the gradients of parameters marked ``sequence_parallel`` over the
    tensor-parallel group, and averages those marked so; before it, DDP has summed over
    context-parallel ranks.
    """
    parameters = {name: one for name, one in parameters.items() if one.requires_grad}
    whole = {
        name: torch.full_like(parameter, torch.nan) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
    }
    if cp_group.size() > 1:
        whole |= summed(whole, cp_group)
    if setup.sequence_parallel:
        marked = [n for n, p in parameters.items() if getattr(p, "sequence_parallel", False)]
        whole |= summed({n: whole[n] for n in marked}, world.tp_group())
    mark = "average_gradients_across_tp_domain"
    averaged = {n: whole[n] for n, p in parameters.items() if getattr(p, mark, False)}
    sums = summed(averaged, world.tp_group())
    whole |= {name: total / world.tp_size() for name, total in sums.items()}
    dims = {name: shard_dim(name, setup) for name in parameters}
    sharded = {n: whole[n] for n, dim in dims.items() if dim is not None}
    if not sharded:
        return whole
    parts = [split_like(part, sharded) for part in world.gather(flat(sharded)[None], 0).unbind()]
    return whole | {n: torch.cat([part[n] for part in parts], dims[n]) for n in sharded}


def summed(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Every tensor summed over a group, in one all-reduce because that is faster."""
    return split_like(world.all_reduce(flat(tensors), group=group), tensors) if tensors else {}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All elements, one tensor after the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def split_like(elements: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`flat`, for tensors of these names and shapes."""
    parts = elements.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view_as(t) for part, (name, t) in zip(parts, tensors.items())}


def named_tensors(mla: OracleMLA, result: OracleResult) -> dict[str, Tensor]:
    """Output and gradients by parameter name; the rows of k_rope have a name of their own."""
    named = {"output": result.output, "input gradient": result.input_grad}
    for name, gradient in result.weight_grads.items():
        parameter = PARAMETERS[name][0][0]
        if name == "w_dkv":
            named[f"{parameter} [latent rows]"] = gradient[: mla.kv_lora_rank]
            if mla.rope:
                named[f"{parameter} [k_rope rows]"] = gradient[mla.kv_lora_rank :]
        else:
            named[parameter] = gradient
    return named


def module_table(attention: nn.Module, mla: OracleMLA, layout: Layout) -> Table | None:
    """The float32 rotary table of the module, on the CPU; None without RoPE."""
    if not mla.rope:
        return None
    cos, sin = attention.rotary.cos_sin(layout.tokens, world.device())
    return cos.cpu(), sin.cpu()


def worst_over_ranks(deviation: Deviation) -> Deviation:
    """The largest errors over all ranks, so that all ranks pass or fail together."""
    names = sorted(deviation.errors)
    errors = torch.tensor([deviation.errors[n] for n in names], dtype=torch.float64)
    errors = world.all_reduce(errors, dist.ReduceOp.MAX).tolist()
    return Deviation(dict(zip(names, errors, strict=True)), deviation.bounds)
