"""``absorbed-mla-serve FOLDER``: serve a model over OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import logging.config
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.own_packages import require_own_packages
from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import add_flags, given_options
from absorbed_mla.serving.option_schema import Options, documented, option

_API_KEY = "ABSORBED_MLA_API_KEY"
# Seconds after which a thread gets its turn. The model's thread gives it away several times a step,
# to write to and read from pipes; while the other one sends the tokens of a hundred streams, it
# would have it back too late for the next step by Python's 0.005.
_SWITCH_INTERVAL = 0.0005


def _are_origins(text: str) -> bool:
    """Whether it is ``*``, or schemes and hosts separated by commas."""
    return text == "*" or all("://" in one.strip(" /") for one in text.split(","))


@documented
@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Options of the server beside those of ``LLM``."""

    tokenizer: str | None = option(None, unset="the model's own")
    """Folder, or 'bytes'."""
    served_model_name: str | None = option(None, unset="the folder's name")
    """Of the model, for clients."""
    lora_modules: tuple[str, ...] = option((), accepted="NAME=FOLDER, with names of their own")
    """Adapters in PEFT's format as NAME=FOLDER, which requests choose by ``model``. They need
    ``enable_lora``."""
    host: str = option("127.0.0.1")
    """Address to listen on; 127.0.0.1: this machine only, 0.0.0.0: all."""
    port: int = option(8000, least=0, most=2**16 - 1)
    """Port to listen on; 0: any that is free."""
    api_key: str | None = option(None, unset=f"${_API_KEY}, if set")
    """Key that clients must send."""
    tool_call_parser: str = option("auto", choices=("auto", *TOOL_PARSERS.names()))
    """Format in which the model calls tools; auto: that of its chat template."""
    reasoning_parser: str | None = option(
        None, choices=("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2"), unset="none"
    )
    """How the model thinks: answers then have that apart from their text."""
    enable_rl_endpoints: bool = option(False)
    """Endpoints for trainers. docs/rl.md lists them."""
    max_body_bytes: int = option(2**24, least=1)
    """Most bytes of a request's body."""
    allowed_origins: str | None = option(
        None,
        valid=_are_origins,
        accepted="* or origins such as https://example.com, separated by commas",
        unset="none",
    )
    """Web pages that may read answers (CORS), by their origins, separated by commas; *: all."""
    access_log: bool = option(
        True, flag="--no-access-log", flag_help={False: "write no line for each request"}
    )
    """A line is written for each request."""
    log_format: str = option("text", choices=("text", "json"))
    """Of the log. With json, each line is an object."""
    shutdown_timeout: float = option(5.0, least=0)
    """Seconds that requests have to end after SIGTERM. No more are taken then."""
    step_timeout: float = option(300.0, above=0)
    """Seconds that a step may take; then ``/health`` answers 503."""
    heartbeat_timeout: float = option(20.0, least=2)
    """Seconds that a process of the model may be silent; then ``/health`` answers 503."""

    @property
    def origins(self) -> list[str]:
        """The origins of web pages that may read answers."""
        return [one.strip(" /") for one in (self.allowed_origins or "").split(",") if one]

    def adapters(self, name: str, options: LLMOptions) -> dict[str, LoRARequest]:
        """The adapters by their names; ``name`` is the model's.

        Raises:
            ValueError: If a name is taken or a folder is none of an adapter, or ``options`` have
                no room for any.
        """
        found: dict[str, LoRARequest] = {}
        for i, given in enumerate(self.lora_modules):
            own, separator, folder = given.partition("=")
            if not separator or own in (name, *found):
                words = "NAME=FOLDER, with names of their own"
                raise ValueError(f"--lora-modules must be {words}, got {given!r}")
            found[own] = LoRARequest(own, i + 1, folder)
        if found and not options.enable_lora:
            raise ValueError("--lora-modules needs --enable-lora")
        return found

    @property
    def key(self) -> str | None:
        """The key that clients must send.

        Raises:
            ValueError: If it is empty.
        """
        key = self.api_key if self.api_key is not None else os.environ.get(_API_KEY)
        if key is not None and not key.strip():
            raise ValueError(f"--api-key (or ${_API_KEY}) must not be empty")
        return key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0 after a signal, 1 if the model has died, 2 after wrong input.
    """
    # Megatron warns about every optional package that it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    args = build_parser().parse_args(argv)
    try:
        options = LLMOptions(**given_options(args, LLMOptions))
        server = ServerOptions(**given_options(args, ServerOptions))
        return _serve(args.model, options, server, server.key)
    except ValueError as error:
        print(f"absorbed-mla-serve: error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; options of ``LLM`` have their names in what it parses."""
    parser = argparse.ArgumentParser(
        prog="absorbed-mla-serve",
        description="Serve a model over OpenAI's HTTP interface: /v1/completions, "
        "/v1/chat/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /version, "
        "/health, /ping, /metrics.",
    )
    parser.add_argument(
        "model", type=Path, help="folder with a checkpoint: Hugging Face's, Megatron's or absorbed"
    )
    add_flags(parser.add_argument_group("server"), ServerOptions)
    add_flags(parser.add_argument_group("model"), LLMOptions)
    return parser


def _serve(model: Path, options: LLMOptions, own: ServerOptions, api_key: str | None) -> int:
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
    from absorbed_mla.serving.server.http_server import (
        HTTPServer,
        allow_many_connections,
        require_free,
    )
    from absorbed_mla.serving.server.logs import log_config
    from absorbed_mla.serving.server.metrics import Metrics
    from absorbed_mla.serving.server.output_parsers import OutputParsers
    from absorbed_mla.serving.server.service import Service

    require_free(own.host, own.port)
    # Also of what is logged before the server runs.
    logging.config.dictConfig(log_config(own.log_format))
    logging.captureWarnings(own.log_format == "json")
    name = own.served_model_name or model.resolve().name
    loras = own.adapters(name, options)
    metrics, died = Metrics(name), []

    def on_death() -> None:
        died.append(True)
        server.should_exit = True

    try:
        llm = LLM(model, tokenizer=own.tokenizer, **vars(options))
    except EngineDeadError as error:
        if own.log_format == "json":
            logging.getLogger(__name__).critical("%s", error)
        else:
            print(f"absorbed-mla-serve: error: {error}", file=sys.stderr)
        return 1
    with llm:
        timeouts = {name: getattr(own, name) for name in ("step_timeout", "heartbeat_timeout")}
        service = Service(llm, metrics, on_death, **timeouts)
        most = own.max_body_bytes
        template = getattr(llm.tokenizer, "chat_template", "")
        parsers = OutputParsers.chosen(own.tool_call_parser, own.reasoning_parser, template)
        limits = {"max_body_bytes": most, "parsers": parsers, "loras": loras}
        limits["enable_rl_endpoints"] = own.enable_rl_endpoints
        app = build_app(service, metrics, name, api_key, own.origins, **limits)
        server = HTTPServer(
            app,
            service,
            own.host,
            own.port,
            access_log=own.access_log,
            max_body_bytes=most,
            shutdown_timeout=own.shutdown_timeout,
            log_format=own.log_format,
        )
        leave_out_what_is_there()
        allow_many_connections()
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
