#!/usr/bin/env python3
"""Count the files of absorbed_mla that one forward of the layer enters, and show their order.

    $ python scripts/checks/trace_files.py
    training forward   16 files, 64 changes of file
      attention -> unsupported -> ...
    decode             14 files, ...

A file is entered when one of its functions is called. Both forwards run on the CPU with the
reference backend: a training forward in the expanded form, and a decode step of three requests in
Megatron's dynamic inference context. The counts are those of a later forward; the first one chooses
a backend besides. Exit code 1 if a count is above its bound.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "scripts"))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from absorbed_mla.options import FORMS  # noqa: E402
from console.parser import Parser  # noqa: E402
from console.script import FAILED, leave, run_script  # noqa: E402

BOUNDS = {"training forward": 16, "decode": 14}
_SIZES = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "cache_mla_latents": True,
}
_BLOCK_SIZE = 64


def main(argv: list[str] | None = None) -> int:
    """Print both traces; returns the exit code."""
    return run_script("trace_files.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser("trace_files.py", __doc__)
    parser.add_argument(
        "--form", choices=FORMS[1:], default="expanded", help="of the training forward"
    )
    counts = {}
    for name, entered in traces(parser.parse_args(argv).form).items():
        files = list(dict.fromkeys(entered))
        counts[name] = len(files)
        print(f"{name:18} {len(files)} files, {len(entered) - 1} changes of file")
        print(f"  {' -> '.join(files)}")
    return FAILED if any(counts[name] > bound for name, bound in BOUNDS.items()) else 0


def traces(form: str = "expanded") -> dict[str, list[str]]:
    """The files that each forward is in, one after the other."""
    _start_megatron()
    return {
        "training forward": entered_files(_training_forward(form)),
        "decode": entered_files(_decode()),
    }


def entered_files(forward: Callable[[], object]) -> list[str]:
    """The files of absorbed_mla that calls of ``forward`` are in, each change of file once."""
    import absorbed_mla

    package = Path(absorbed_mla.__file__).parent
    entered: list[str] = []

    def record(frame, event: str, _) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(package)):
            name = str(Path(path).relative_to(package).with_suffix(""))
            if name == "cpu_host":  # stands in for torch.cuda
                return
            if not entered or entered[-1] != name:
                entered.append(name)

    forward()
    sys.setprofile(record)
    try:
        forward()
    finally:
        sys.setprofile(None)
    return entered


def _start_megatron() -> None:
    """One process on the CPU."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from absorbed_mla.serving.cpu_engine import enable_cpu_inference

    enable_cpu_inference()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)


def _layer(form: str):
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from absorbed_mla import AbsorbedMLAOptions
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec

    config = MLATransformerConfig(**_SIZES)
    options = AbsorbedMLAOptions(
        form=form, core_attention_backend="reference", paged_attention_backend="reference"
    )
    spec = get_absorbed_mla_layer_spec(config, options=options)
    return build_module(spec.submodules.self_attention, config=config, layer_number=1)


def _training_forward(form: str) -> Callable[[], object]:
    import torch

    layer, hidden_states = _layer(form), torch.randn(5, 1, 32)
    return lambda: layer(hidden_states, None)


def _decode() -> Callable[[], object]:
    """A step of three requests that generate one token each."""
    import torch
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    layer = _layer("absorbed").eval()
    context = DynamicInferenceContext(
        layer.config,
        InferenceConfig(
            block_size_tokens=_BLOCK_SIZE,
            buffer_size_gb=32 * _BLOCK_SIZE * 20 * 4 / 2**30,
            max_sequence_length=2 * _BLOCK_SIZE,
            max_requests=4,
            max_tokens=4 * _BLOCK_SIZE,
        ),
    )
    for number in range(3):
        sampling = SamplingParams(num_tokens_to_generate=16, termination_id=-1)
        prompt = torch.zeros(4 + number, dtype=torch.long)
        context.add_request(
            DynamicInferenceRequest(
                request_id=number, prompt_tokens=prompt, sampling_params=sampling
            )
        )

    @torch.inference_mode()
    def step() -> None:
        context.initialize_attention_state()
        hidden_states = torch.randn(context.padded_active_token_count, 1, 32)
        layer(hidden_states, None, inference_context=context)

    def end_step() -> None:
        context.update_requests(torch.ones(3, dtype=torch.uint8), torch.zeros(3).long())

    step()  # the prompts
    end_step()
    return step


if __name__ == "__main__":
    leave(main())
