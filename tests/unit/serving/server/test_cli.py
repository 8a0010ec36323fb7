"""``absorbed-mla-serve``: its options, and the whole of it around a real model."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import torch
from openai import OpenAI

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.option_flags import given_options
from absorbed_mla.serving.server import cli
from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.llm import tiny_folder, until

COMMAND = [sys.executable, "-m", "absorbed_mla.serving.server.cli"]


def refused(capsys, *words: str) -> str:
    """What is printed about wrong options."""
    assert cli.main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("absorbed-mla-serve: error: ") and error.count("\n") == 1
    return error


class TestOptions:
    def test_help_needs_neither_torch_nor_megatron(self):
        """Or it would take seconds."""
        code = (
            "import sys\n"
            "from absorbed_mla.serving.server import cli\n"
            "try:\n    cli.main(['--help'])\n"
            "except SystemExit:\n"
            "    print({'torch', 'megatron', 'uvicorn', 'transformers'} & set(sys.modules))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        *lines, last = done.stdout.splitlines()
        assert last == "set()", done.stderr
        shown = " ".join(" ".join(lines).split())
        assert (
            "usage: absorbed-mla-serve" in shown
            and "this machine only, 0.0.0.0: all (default: 127.0.0.1)" in shown
        )
        assert "requests that run together; others wait (default: 64)" in shown

    def test_defaults(self, monkeypatch):
        args = cli.build_parser().parse_args(["folder"])
        assert (args.host, args.port, args.enable_prefix_caching) == ("127.0.0.1", 8000, True)

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (["--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1, got 0"),
            (
                ["--parity", "--form", "expanded"],
                "parity needs form='absorbed' or 'auto', got 'expanded'",
            ),
            (
                ["--prefill-graph-tokens", "64"],
                "prefill_graph_tokens needs cuda_graphs=True, got False",
            ),
            (["--api-key", " "], "--api-key (or $ABSORBED_MLA_API_KEY) must not be empty"),
            (
                ["--allowed-origins", "example.com"],
                "allowed_origins must be * or origins such as https://example.com, separated by "
                "commas, or None, got 'example.com'",
            ),
            (["--lora-modules", "a=b"], "lora_path: b has no adapter_config.json"),
            (["--lora-modules", "a"], "--lora-modules must be NAME=FOLDER, with names of their"),
            (
                ["--enable-lora", "--parity", "--tensor-parallel-parts", "2"],
                "enable_lora needs tensor_parallel_parts=None, got 2",
            ),
            (["--port", "70000"], "port must be an integer from 0 to 65535, got 70000"),
            (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: "),
            (["--port", "0"], "model must be a folder with a checkpoint, and there is no nowhere"),
        ],
    )
    def test_refused(self, capsys, words, error):
        assert error in refused(capsys, "nowhere", *words)

    def test_warnings_of_megatron_are_not_shown(self, capsys):
        """About each optional package that is not there, before the one line that says what is."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            refused(capsys, "nowhere")
            for module in ("megatron.core.models.backends", "mine"):
                warnings.warn_explicit(module, UserWarning, "file.py", 1, module=module)
        shown = [str(one.message) for one in seen]
        assert "mine" in shown and not any("megatron" in text for text in shown)

    def test_port_in_use(self, capsys):
        """Seen before the model is loaded."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            error = refused(capsys, "nowhere", "--port", str(port))
            assert f"--port {port}: " in error and "in use" in error

    @pytest.mark.parametrize(
        "words", [["folder", "--dtype", "int8"], [], ["folder", "--port", "x"]]
    )
    def test_refused_by_argparse(self, capsys, words):
        with pytest.raises(SystemExit) as found:
            cli.main(words)
        assert found.value.code == 2 and "usage: absorbed-mla-serve" in capsys.readouterr().err

    @pytest.mark.parametrize("package", ["uvicorn", "starlette", "prometheus_client", "pydantic"])
    def test_missing_package(self, capsys, monkeypatch, package):
        monkeypatch.setitem(sys.modules, package, None)
        error = refused(capsys, "nowhere")
        assert f"{package} is missing: pip install 'absorbed-mla[serve]'" in error

    @pytest.mark.parametrize(
        ("given", "origins"),
        [(None, []), ("*", ["*"]), ("https://a.b/, http://c:8", ["https://a.b", "http://c:8"])],
    )
    def test_origins(self, given, origins):
        assert cli.ServerOptions(allowed_origins=given).origins == origins

    def test_key(self, monkeypatch):
        """From the option, or else from the environment."""

        def key(*words: str) -> str | None:
            args = cli.build_parser().parse_args(["folder", *words])
            return cli.ServerOptions(**given_options(args, cli.ServerOptions)).key

        assert key() is None
        monkeypatch.setenv("ABSORBED_MLA_API_KEY", "secret")
        assert key() == "secret"
        assert key("--api-key", "other") == "other"
        monkeypatch.setenv("ABSORBED_MLA_API_KEY", "")
        with pytest.raises(ValueError, match="must not be empty"):
            key()


@needs.no_gpu
@pytest.mark.usefixtures("forked_python")
class TestEndToEnd:
    """The whole command, two ranks, parity mode."""

    PROMPTS = ("An", "the quick brown fox")

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        return tiny_folder(tmp_path_factory.mktemp("served") / "tiny")

    def start(self, folder, tmp_path, tp: int, *more: str):
        """The command's process and a client of it."""
        words = f"--tokenizer bytes --parity --port 0 --tensor-parallel-size {tp}".split()
        words += more
        words += ["--prompt-logprobs"] if tp == 1 else []
        env = without_launcher(ABSORBED_MLA_API_KEY="secret", TMPDIR=str(tmp_path))
        log = (tmp_path / "log").open("w+")
        process = subprocess.Popen([*COMMAND, str(folder), *words], env=env, stderr=log, stdout=log)

        def port():
            assert process.poll() is None, (tmp_path / "log").read_text()
            return re.search(r"running on http://127.0.0.1:(\d+)", (tmp_path / "log").read_text())

        until(port, 120)
        url = f"http://127.0.0.1:{port()[1]}/v1"
        return process, OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)

    def require_gone(self, process, children, tmp_path, code: int) -> None:
        assert process.wait(15) == code, (tmp_path / "log").read_text()
        until(lambda: not any(child.is_running() for child in children))
        assert not list(tmp_path.glob("absorbed_mla_*"))

    def require_loglikelihoods(self, folder, client) -> None:
        """Those of continuations, as lm-eval asks for and reads them, are transformers'."""
        transformers = pytest.importorskip("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        pairs = [(b"The sky is", b" blue"), (b"One and one", b" make two"), (b"a", b"bc")]
        texts = [list(context + continuation) for context, continuation in pairs]
        ask = {"max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234, "echo": True}
        answer = client.completions.create(model="tiny", prompt=texts, **ask)
        choices = sorted(answer.choices, key=lambda one: one.index)
        for (context, _), text, choice in zip(pairs, texts, choices, strict=True):
            place = slice(len(context), -1)
            found, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            with torch.no_grad():
                scores = model(torch.tensor([text])).logits[0, len(context) - 1 : -1]
            expected = scores.log_softmax(-1)
            own = expected.gather(1, torch.tensor(text[len(context) :])[:, None])
            assert sum(found[place]) == pytest.approx(own.sum().item(), abs=1e-4)
            best = [max(top.values()) for top in tops[place]]
            assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)

    def require_hung_while_stopped(self, client, rank) -> None:
        """/health turns 503 after the two seconds, also where no request runs, and back to 200."""
        url = str(client.base_url).replace("/v1/", "/health")

        def health() -> int:
            with contextlib.suppress(urllib.error.HTTPError):
                return urllib.request.urlopen(url).status
            return 503

        assert health() == 200
        rank.suspend()
        until(lambda: health() == 503, 5)
        rank.resume()
        until(lambda: health() == 200, 5)

    def test_killed_rank(self, folder, tmp_path):
        process, client = self.start(folder, tmp_path, 2, "--heartbeat-timeout", "2")
        ask = {"model": "tiny", "seed": 5, "extra_body": {"ignore_eos": True}}
        pieces = client.completions.create(
            **ask, prompt=list(self.PROMPTS), max_tokens=8, n=2, logprobs=0, stream=True
        )
        shown: dict[int, list[float]] = {}
        texts: dict[int, str] = {}
        for piece in pieces:
            [choice] = piece.choices
            shown.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        with LLM(folder, tokenizer="bytes", parity=True) as llm:
            params = SamplingParams(max_tokens=8, seed=5, n=2, logprobs=0, ignore_eos=True)
            outputs = llm.generate(list(self.PROMPTS), params, use_tqdm=False)
        for i, output in enumerate(outputs):
            for j, one in enumerate(output.outputs):
                expected = [p[t].logprob for t, p in zip(one.token_ids, one.logprobs)]
                assert texts[2 * i + j] == one.text
                assert shown[2 * i + j] == pytest.approx(expected, abs=1e-4)

        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        self.require_hung_while_stopped(client, children[1])

        def wait(stream: bool) -> None:
            answer = client.completions.create(**ask, prompt="text", max_tokens=480, stream=stream)
            if stream:
                for _ in answer:
                    pass

        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(wait, number % 2 == 0) for number in range(4)]
            time.sleep(0.3)
            children[1].kill()
            for one in waiting:
                with pytest.raises(openai.APIError, match="the model has stopped"):
                    one.result(30)
        self.require_gone(process, children, tmp_path, 1)
        assert "the process of rank 1 has ended with code -9" in (tmp_path / "log").read_text()

    def test_terminated(self, folder, tmp_path):
        process, client = self.start(
            folder, tmp_path, 1, "--log-format", "json", "--enable-rl-endpoints"
        )
        assert client.models.list().data[0].id == "tiny"
        asleep = str(client.base_url).replace("/v1/", "/is_sleeping")
        assert client.get(asleep, cast_to=object) == {"is_sleeping": False}
        self.require_loglikelihoods(folder, client)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        self.require_gone(process, children, tmp_path, 0)
        # Every line, also of what was logged before the server ran.
        lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert any("Shutting down" in one["message"] for one in lines)
