"""``absorbed-mla-serve FOLDER``: serve a model over OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from absorbed_mla.options import LATENT_CACHE_DTYPES
from absorbed_mla.own_packages import require_own_packages
from absorbed_mla.serving.llm_options import DEVICES, DTYPES, EXPERTS, LLMOptions

_API_KEY = "ABSORBED_MLA_API_KEY"
# Seconds after which a thread gets its turn. The model's thread gives it away several times a step,
# to write to and read from pipes; while the other one sends the tokens of a hundred streams, it
# would have it back too late for the next step by Python's 0.005.
_SWITCH_INTERVAL = 0.0005
# Option, type, help; the names are those of LLMOptions.
_NUMBERS = (
    ("tensor-parallel-size", int, "processes that share every layer (default: 1, or as below)"),
    ("pipeline-parallel-size", int, "stages that share the layers: memory, not speed"),
    ("expert-parallel-size", int, "groups of the processes that share the experts"),
    ("max-model-len", int, "tokens of a prompt and its answer (default: the model's)"),
    ("max-num-seqs", int, "requests that run together; others wait"),
    ("max-num-batched-tokens", int, "tokens of a forward pass; longer prompts are read in chunks"),
    ("cache-tokens", int, "tokens that the latent cache holds (default: what fits)"),
    ("host-cache-tokens", int, "tokens that it holds in host memory besides, streamed; slower"),
    ("gpu-memory-utilization", float, "share of the GPU's memory for model and cache"),
    ("num-speculative-tokens", int, "tokens that the checkpoint's MTP layer drafts per step"),
    (
        "prefill-graph-tokens",
        int,
        "of a step that reads prompts in one CUDA graph; 0: one per layer (default: up to 3072)",
    ),
    ("prefix-cache-bytes", int, "most bytes in --prefix-cache-dir"),
    ("seed", int, "of requests without a seed"),
)
_SWITCHES = (
    ("follow-links", "read through links that lead out of the model's folder"),
    ("trust-remote-code", "run Python code of the tokenizer's folder, if the tokenizer needs it"),
    ("prompt-logprobs", "allow log-probabilities of prompts"),
    ("decode-context-parallel", "processes share the cache: as many times the tokens"),
    ("data-parallel-attention", "each process has whole attention, for requests of its own"),
    ("parity", "equal tokens to the bit whatever runs beside a request; slower"),
    ("cuda-graphs", "capture decode steps as CUDA graphs"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0 after a signal, 1 if the model has died, 2 after wrong input.
    """
    # Megatron warns about every optional package that it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        given = {name: value for name, value in vars(args).items() if hasattr(LLMOptions, name)}
        options = LLMOptions(**{k: v for k, v in given.items() if v is not None})
        key = _api_key(args)
        return _serve(args, options, key)
    except ValueError as error:
        print(f"absorbed-mla-serve: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="absorbed-mla-serve",
        description="Serve a model over OpenAI's HTTP interface: /v1/completions, "
        "/v1/chat/completions, /v1/models, /health, /metrics.",
    )
    parser.add_argument(
        "model", type=Path, help="folder with a checkpoint: Hugging Face's, Megatron's or absorbed"
    )
    parser.add_argument("--tokenizer", help="folder, or 'bytes' (default: the model's own)")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name")
    network = parser.add_argument_group("network")
    network.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 is all (default: this machine only)",
    )
    network.add_argument(
        "--port", type=int, default=8000, help="default: 8000; 0: any that is free"
    )
    network.add_argument(
        "--api-key", metavar="KEY", help=f"that clients must send (default: ${_API_KEY}, if set)"
    )
    network.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="write no line for each request",
    )
    model = parser.add_argument_group("model")
    for name, kind, text in _NUMBERS:
        default = getattr(LLMOptions, name.replace("-", "_"))
        shown = text if default is None else f"{text} (default: {default})"
        model.add_argument(f"--{name}", type=kind, metavar="N", help=shown)
    model.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    model.add_argument("--device", choices=DEVICES, help="default: a GPU where there is one")
    model.add_argument("--form", choices=("auto", "absorbed", "expanded"), help="of the attention")
    cached = "of cached latents (default: the model's)"
    model.add_argument("--latent-cache-dtype", choices=LATENT_CACHE_DTYPES, help=cached)
    together = "computed together, or one after the other (default: together on a CPU)"
    model.add_argument("--experts", choices=EXPERTS, help=together)
    model.add_argument(
        "--prefix-cache-dir", metavar="FOLDER", help="where beginnings of prompts stay cached"
    )
    for name, text in _SWITCHES:
        model.add_argument(f"--{name}", action="store_true", help=text)
    model.add_argument(
        "--decode-context-parallel-auto",
        dest="decode_context_parallel",
        action="store_const",
        const="auto",
        help="share it where not all requests would fit otherwise",
    )
    model.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="share no cache between requests",
    )
    return parser


def _api_key(args: argparse.Namespace) -> str | None:
    """The key that clients must send.

    Raises:
        ValueError: If it is empty.
    """
    key = args.api_key if args.api_key is not None else os.environ.get(_API_KEY)
    if key is not None and not key.strip():
        raise ValueError(f"--api-key (or ${_API_KEY}) must not be empty")
    return key


def _serve(args: argparse.Namespace, options: LLMOptions, api_key: str | None) -> int:
    try:
        import prometheus_client  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install 'absorbed-mla[serve]'") from error
    require_own_packages("checkpoint_conversion", "specs")
    from absorbed_mla.serving.executor.multiprocess import EngineDeadError
    from absorbed_mla.serving.gc_freeze import leave_out_what_is_there
    from absorbed_mla.serving.llm import LLM
    from absorbed_mla.serving.server.app import build_app
    from absorbed_mla.serving.server.http_server import HTTPServer, require_free
    from absorbed_mla.serving.server.metrics import Metrics
    from absorbed_mla.serving.server.service import Service

    require_free(args.host, args.port)
    name = args.served_model_name or args.model.resolve().name
    metrics, died = Metrics(), []

    def on_death() -> None:
        died.append(True)
        server.should_exit = True

    try:
        llm = LLM(args.model, tokenizer=args.tokenizer, **vars(options))
    except EngineDeadError as error:
        print(f"absorbed-mla-serve: error: {error}", file=sys.stderr)
        return 1
    with llm:
        service = Service(llm, metrics, on_death)
        app = build_app(service, metrics, name, api_key)
        server = HTTPServer(app, service, args.host, args.port, access_log=args.access_log)
        leave_out_what_is_there()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        service.start()
        # uvicorn ends at these signals, and then raises them once more.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            server.run()
        finally:
            service.stop()
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
