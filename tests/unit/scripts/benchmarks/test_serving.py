"""scripts/benchmarks/serving.py: ours on the CPU beside a fake vLLM, its clock and its client."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.llm.server import cli
from benchmarks.served import contenders, streams
from benchmarks.served.burst import Burst, Timeline, percentile
from benchmarks.served.model import token_bytes, write_model, write_tokenizer
from benchmarks.served.report import Case, Row, ServingReport, Size, table
from benchmarks.served.settings import Settings
from benchmarks.serving import ServingBenchmark, settings
from benchmarks.synthetic_checkpoint.models import Choice
from tests.support import needs
from tests.support.llm import serving

TINY = shlex.split(
    "--device cpu --scale-down 32 --vocab-size 300 --dense-layers 1 --moe-layers 1 --experts 2 "
    "--max-num-batched-tokens 128 --repeats 1"
)
# A package with vLLM's names, whose requests get one token each in a step.
VLLM = """
from types import SimpleNamespace as Some
class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, output_kind):
        assert ignore_eos and output_kind == "delta"
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, enable_prefix_caching, kv_cache_memory_bytes, enforce_eager, **more):
        assert not enable_prefix_caching and kv_cache_memory_bytes > 0 and enforce_eager
        self.llm_engine, self.left = self, {}
        self.engine_core = Some(shutdown=lambda: None)
    def add_request(self, name, prompt, params):
        assert len(prompt["prompt_token_ids"]) > 0
        self.left[name] = params.max_tokens + LATE
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        import time
        time.sleep(0.001)
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1} | {
            name: 0 for name, left in self.left.items() if left == 1}
        done = [Some(request_id=name, outputs=[Some(token_ids=[7])]) for name in self.left]
        self.left = {name: left for name, left in self.left.items() if left}
        return done
"""
SERVER = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["model"] == "model", body
        self.send_response(200); self.end_headers()
        for token in range(body["max_tokens"]):
            time.sleep(0.02)
            self.wfile.write(b'data: {"choices": [{"text": " a"}]}\\n\\n'); self.wfile.flush()
        self.wfile.write(b"data: [DONE]\\n\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1] == "serve" and "--no-enable-prefix-caching" in sys.argv
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_vllm(folder: Path, late: int = 0) -> Path:
    """A folder with a package of that name; ``late`` tokens more than asked for."""
    cli = folder / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(VLLM.replace("LATE", str(late)))
    kinds = "class RequestOutputKind: DELTA = 'delta'"
    (folder / "vllm" / "sampling_params.py").write_text(kinds)
    (folder / "vllm" / "entrypoints" / "__init__.py").touch()
    (cli / "__init__.py").touch()
    (cli / "main.py").write_text(SERVER)
    (folder / "vllm-0.24.0.dist-info").mkdir()
    (folder / "vllm-0.24.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.24.0\n")
    return folder


def burst(requests: int = 2, new_tokens: int = 8) -> Burst:
    return Burst(requests, 5, new_tokens, 0.0, 1, 250)


def run(capsys, *options: str) -> tuple[int, dict, str]:
    code = ServingBenchmark.main([*TINY, *options])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1])[0], out


@needs.no_gpu
def test_ours_beside_a_fake_vllm(tmp_path, capsys):
    vllm, file = fake_vllm(tmp_path / "vllm"), tmp_path / "serving.json"
    names = "ours,vllm,vllm-server"
    options = ["--vllm", str(vllm), "--implementations", names, "--rows", "2x64/8,1x70/8"]
    code, report, out = run(capsys, *options, "--json", str(file))
    assert code == 0
    rows = {(row["implementation"], row["size"]["requests"]): row for row in report["rows"]}
    # Those that live together take turns; servers come after them.
    assert [name for name, _ in rows] == ["ours", "vllm"] * 2 + ["vllm-server"] * 2
    for row in rows.values():
        assert 0 < row["ttft_ms"] <= row["ttft_p90_ms"] and row["prefill_tokens_per_second"] > 0
        of_step = 1e3 * row["size"]["requests"] / row["step_ms"]
        assert row["decode_tokens_per_second"] == pytest.approx(of_step)
    assert report["environment"]["versions"]["vllm"] == "0.24.0"
    assert "| ours | 2 x 64/8 |" in out and "| vllm-server | 1 x 70/8 |" in out
    assert ServingReport.read(file).summary()["rows"] == report["rows"]


def test_what_fails_is_an_error_of_its_rows(tmp_path, capsys):
    vllm = fake_vllm(tmp_path / "vllm", late=1)
    (vllm / "vllm" / "entrypoints" / "cli" / "main.py").write_text("raise ValueError('no GPU')")
    options = ["--vllm", str(vllm), "--implementations", "vllm,vllm-server", "--rows", "1x8/6"]
    code, report, _ = run(capsys, *options)
    assert code == 1
    first, second = report["rows"]
    assert "request 0 generated 9 tokens instead of 8" in first["error"]
    assert "vllm-server has ended" in second["error"] and "ValueError: no GPU" in second["error"]


class TestTimeline:
    def test_figures(self):
        """Two requests; the second waits for the first one's prompt."""
        timeline = Timeline(burst(2, 6))
        for step in range(6):
            timeline.add(0, 1.0 + step, 1)
        for step in range(6):
            timeline.add(1, 2.0 + step, 1)
        figures = timeline.figures()
        # All have begun at 2, and the first ends at 6: four steps of two tokens.
        assert figures["decode_tokens_per_second"] == 2.0 and figures["step_ms"] == 1000
        assert figures["ttft_ms"] == 1500 and figures["ttft_p90_ms"] == 2000
        assert figures["input_tokens_per_second"] == 5.0 and figures["seconds"] == 7

    def test_no_time_with_all_of_them_is_no_rate(self):
        timeline = Timeline(burst(2, 6))
        for request in range(2):
            for step in range(6):
                timeline.add(request, 1.0 + 4 * request + step, 1)
        assert timeline.figures()["decode_tokens_per_second"] is None

    def test_a_wrong_number_of_tokens(self):
        timeline = Timeline(burst(1, 2))
        timeline.add(0, 1.0, 1)
        with pytest.raises(RuntimeError, match="request 0 generated 1 tokens instead of 2"):
            timeline.figures()

    def test_percentile(self):
        assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
        assert percentile([1], 0.9) == 1 and percentile([1, 2, 3], 0.5) == 2


def test_prompts_differ_by_seed_and_only_by_it():
    first, again, other = (
        Burst(2, 9, 1, 0, 5, 50),
        Burst(2, 9, 8, 1, 5, 50),
        Burst(2, 9, 1, 0, 6, 50),
    )
    assert first.prompts() == again.prompts() != other.prompts()
    one, two = first.prompts()
    assert one != two and len(one) == 9 and all(2 <= token < 50 for token in one + two)


class TestStreams:
    def test_the_server(self):
        """Ours, around a fake model."""
        with serving() as served:
            served.runner.step_seconds = 0.02
            figures = streams.run(served.port, "tiny", burst(), 10)
            assert figures["decode_tokens_per_second"] > 0 and figures["ttft_ms"] > 0
            with pytest.raises(RuntimeError, match="a request was refused: HTTP"):
                streams.run(served.port, "other", burst(), 10)

    def test_tokens_that_came_together(self):
        assert streams.token_shares([1, 1, 1], 3) == [1, 1, 1]
        assert streams.token_shares([1, 2], 7) == [1, 6] and streams.token_shares([2], 3) == [3]
        assert streams.token_shares([1], 1) == [1]


class TestModel:
    def test_the_tokenizer_has_a_word_for_every_token(self, tmp_path):
        from transformers import AutoTokenizer

        write_tokenizer(tmp_path, 3000)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
        words = [tokenizer.decode([token]) for token in range(2, 3000)]
        assert len(tokenizer) == len({*words}) + 2 == 3000 and tokenizer.eos_token_id == 1
        assert all(word[0] == " " and word[1:].isalpha() for word in words)

    def test_a_folder_with_another_model(self, tmp_path):
        choice = {"model": "deepseek-v3", "layers": 1, "dense_layers": 1, "vocab_size": 64}
        choice |= {"scale_down": 32}
        write_model(tmp_path / "model", Choice(**choice, experts=2))
        write_model(tmp_path / "model", Choice(**choice, experts=2))
        with pytest.raises(ValueError, match="holds another model"):
            write_model(tmp_path / "model", Choice(**choice | {"vocab_size": 65}, experts=2))

    def test_bytes_of_a_token(self):
        config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 8}
        assert token_bytes(config) == 8 * 576 * 2


class TestSettings:
    def made(self, *options: str) -> Settings:
        args = ServingBenchmark.parse([*TINY, "--implementations", "ours", *options])
        config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 8}
        return settings(args, config, Path("model"), "cuda")

    def test_the_cache_holds_every_row(self):
        made = self.made("--rows", "1x8k/256,100x1k/256")
        assert made.max_model_len == 8448 and made.max_num_seqs == 100
        assert made.cache_tokens >= 100 * 1344 and made.cache_bytes == made.cache_tokens * 9216
        assert made.sizes == (1, 100) and made.captured == [1, 2, 4, 8, 16, 32, 64, 100]
        assert made.graphs and not self.made("--eager").graphs
        assert Settings.read(made.text()) == made

    def test_our_server_takes_what_it_is_given(self):
        made = self.made("--rows", "3x64/8")
        command = contenders._server_command("ours-server", made, 8123, "model")
        args = cli._parser().parse_args(command[command.index("-m") + 2 :])
        given = {name: value for name, value in vars(args).items() if hasattr(LLMOptions, name)}
        options = LLMOptions(**{k: v for k, v in given.items() if v is not None})
        assert options.cuda_graphs and not options.enable_prefix_caching
        assert options.cache_tokens == made.cache_tokens and options.max_num_seqs == 3
        assert options.max_model_len == made.max_model_len and args.port == 8123


def test_table():
    def row(name: str, requests: int, rate: float, ttft: float) -> Row:
        case = Case(name, Size(requests, 1024, 256), 0.0)
        rates = {"decode_tokens_per_second": rate, "prefill_tokens_per_second": 2 * rate}
        return Row(case, ttft_ms=ttft, ttft_p90_ms=ttft, **rates)

    rows = [row("ours", 32, 3000, 10), row("vllm", 32, 2000, 40), row("vllm-server", 1, 5, 6)]
    # A server is compared with a server.
    rows += [row("ours-server", 8, 10, 20), row("vllm-server", 8, 40, 10)]
    lines = table(ServingReport({}, rows)).splitlines()[2:]
    assert lines == [
        "| ours | 32 x 1k/256 | 10 | 40 | 0.25 | 6,000 | 4,000 | 1.50 | 3,000 | 2,000 | 1.50 |",
        "| vllm-server | 1 x 1k/256 | 6 | - | - | 10 | - | - | 5 | - | - |",
        "| ours-server | 8 x 1k/256 | 20 | 10 | 2.00 | 20 | 80 | 0.25 | 10 | 40 | 0.25 |",
    ]
