#!/usr/bin/env python3
"""Count the files of absorbed_mla that a forward, a step and a request enter, and show their order.

    $ python scripts/checks/trace_files.py
    training forward   15 files, 63 changes of file, depth 12
      attention -> unsupported -> ...
    decode             12 files, ...
    LLM decode step    20 files, ...
    server request     39 files, ...

A file is entered when one of its functions is called; the depth is the largest number of functions
of the package that wait for each other. All run on the CPU with the reference backend: a training
forward in the expanded form; a decode step of three requests in Megatron's dynamic inference
context; a step of ``LLM`` with three sampled requests, launched ahead as on a GPU; and a request of
four tokens to the server, from its body to its answer. The counts are those of a later forward,
step and request; the first one chooses a backend besides. Exit code 1 if a count is above its
bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "scripts"))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from absorbed_mla.options import FORMS  # noqa: E402
from console.parser import Parser  # noqa: E402
from console.script import FAILED, leave, run_script  # noqa: E402

BOUNDS = {"training forward": 16, "decode": 14, "LLM decode step": 21, "server request": 39}
DEPTHS = {"LLM decode step": 14}
_SIZES = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "normalization": "RMSNorm"}
_SIZES |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
_SIZES |= {"v_head_dim": 8, "qk_layernorm": True, "rope_type": "rope", "cache_mla_latents": True}
_SIZES |= {"add_bias_linear": False, "attention_dropout": 0.0, "use_cpu_initialization": True}
_SIZES |= {"gradient_accumulation_fusion": False, "apply_rope_fusion": False}
_BLOCK_SIZE = 64


def main(argv: list[str] | None = None) -> int:
    """Print the traces; returns the exit code."""
    return run_script("trace_files.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser("trace_files.py", __doc__)
    parser.add_argument(
        "--form", choices=FORMS[1:], default="expanded", help="of the training forward"
    )
    form, exceeded = parser.parse_args(argv).form, False
    _start_megatron()
    llm = _llm()
    for name, call in {
        "training forward": _training_forward(form),
        "decode": _decode(),
        "LLM decode step": _llm_step(llm),
    }.items():
        exceeded |= _shown(name, traced(call))
    exceeded |= _shown("server request", _server_request(llm))
    return FAILED if exceeded else 0


def _shown(name: str, trace: Trace) -> bool:
    """Print a trace; whether it is beyond a bound."""
    files = list(dict.fromkeys(trace.entered))
    changes = len(trace.entered) - 1
    print(f"{name:18} {len(files)} files, {changes} changes of file, depth {trace.depth}")
    print(f"  {' -> '.join(files)}")
    return len(files) > BOUNDS[name] or trace.depth > DEPTHS.get(name, trace.depth)


class Trace:
    """What a profiled call enters; called for every event of the interpreter.

    Attributes:
        entered: The files of absorbed_mla that it is in, each change of file once.
        depth: The largest number of functions of the package on one stack.
    """

    def __init__(self) -> None:
        import absorbed_mla

        self._package = str(Path(absorbed_mla.__file__).parent)
        self.entered: list[str] = []
        self.depth = 0

    @contextlib.contextmanager
    def records(self) -> Iterator[None]:
        """What this thread calls, and nothing that was before."""
        self.entered, self.depth = [], 0
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Record the call of a function of the package; other events are of no interest."""
        name = self._file(frame)
        if event != "call" or name is None:
            return
        if not self.entered or self.entered[-1] != name:
            self.entered.append(name)
        depth, caller = 0, frame
        while caller is not None:
            # A comprehension is a part of its function, and no frame in later versions of Python.
            depth += self._file(caller) is not None and not caller.f_code.co_name.startswith("<")
            caller = caller.f_back
        self.depth = max(self.depth, depth)

    def _file(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if not path.startswith(self._package):
            return None
        name = str(Path(path).relative_to(self._package).with_suffix(""))
        return None if name == "cpu_host" else name  # that stands in for torch.cuda


def traced(forward: Callable[[], object]) -> Trace:
    """What the second one of two calls of ``forward`` enters."""
    trace = Trace()
    forward()
    with trace.records():
        forward()
    return trace


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
        request = {"request_id": number, "prompt_tokens": prompt, "sampling_params": sampling}
        context.add_request(DynamicInferenceRequest(**request))

    @torch.inference_mode()
    def step() -> None:
        context.initialize_attention_state()
        hidden_states = torch.randn(context.padded_active_token_count, 1, 32)
        layer(hidden_states, None, inference_context=context)

    step()  # the prompts
    context.update_requests(torch.ones(3, dtype=torch.uint8), torch.zeros(3).long())
    return step


def _llm():
    """``LLM`` around a small model, whose steps are launched ahead as on a GPU."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from absorbed_mla import LLM
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

    config = MLATransformerConfig(**_SIZES)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=128).eval()
    llm = LLM.from_model(model, max_num_seqs=4, cache_tokens=2048)
    llm.wake()
    llm._runner._engine.scheduler.launches_ahead = True
    return llm


def _llm_step(llm) -> Callable[[], object]:
    """A step of three requests, whose prompts have been computed."""
    from absorbed_mla import SamplingParams

    for length in range(3, 6):
        llm.add_request(list(range(length)), SamplingParams(max_tokens=40, seed=length))
    llm.step()
    return llm.step


def _server_request(llm) -> Trace:
    """A request of four tokens to ``/v1/completions``, in the server's and the model's thread."""
    from absorbed_mla.serving.server import service
    from absorbed_mla.serving.server.app import build_app
    from absorbed_mla.serving.server.metrics import Metrics

    while llm.has_unfinished_requests():
        llm.step()
    # Between two requests it looks whether the model's processes are there, and for statistics.
    service._CHECK = service._SAMPLE = 60.0
    metrics, trace = Metrics(), Trace()
    model = service.Service(llm, metrics, lambda: None)
    app = build_app(model, metrics, "model", None)
    threading.setprofile(trace)
    model.start()
    threading.setprofile(None)
    asyncio.run(_post(app))
    with trace.records():
        asyncio.run(_post(app))
    model.stop()
    return trace


async def _post(app) -> None:
    """Send a request, as an HTTP server does."""
    content = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 4, "temperature": 0}
    body = {"type": "http.request", "body": json.dumps(content).encode(), "more_body": False}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    received, statuses = [body], []

    async def receive() -> dict:
        if received:
            return received.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: dict) -> None:
        statuses.append(message.get("status"))

    await app(scope, receive, send)
    if statuses[0] != 200:
        raise RuntimeError(f"the server answered with {statuses[0]}")


if __name__ == "__main__":
    leave(main())
