"""scripts/benchmarks/serving.py: ours on the CPU beside a fake vLLM, its clock and its client."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import given_options
from absorbed_mla.serving.server import cli
from benchmarks import serving as serving_script
from benchmarks.served import contenders, engines, streams
from benchmarks.served.burst import Burst, Timeline, percentile
from benchmarks.served.engines import Settings
from benchmarks.served.model import token_bytes, write_model, write_tokenizer
from benchmarks.served.report import ServingReport, Size
from benchmarks.serving import ServingBenchmark, settings
from benchmarks.synthetic import Choice
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


CONFIG = {"kv_lora_rank": 16, "qk_rope_head_dim": 2, "num_hidden_layers": 2, "vocab_size": 300}
CONFIG |= dict.fromkeys(("hidden_size", "num_attention_heads", "q_lora_rank"), 8)


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
@pytest.mark.usefixtures("forked_python")
def test_ours_beside_a_fake_vllm(tmp_path, capsys, monkeypatch):
    started, start = [], serving_script.start
    monkeypatch.setattr(
        serving_script, "start", lambda name, *more: started.append(name) or start(name, *more)
    )
    vllm, file = fake_vllm(tmp_path / "vllm"), tmp_path / "serving.json"
    names = "ours,ours-parity,vllm,vllm-server"
    options = ["--vllm", str(vllm), "--implementations", names]
    options += ["--rows", "2x64/8,1x70/8,2x40/3*2"]
    code, report, out = run(capsys, *options, "--json", str(file))
    assert code == 0
    assert started == names.split(","), "once each: none again when it has ended before others"
    # Those that live together take turns; servers come after them.
    found = [row["implementation"] for row in report["rows"]]
    assert found == ["ours", "ours-parity", "vllm"] * 3 + ["vllm-server"] * 3
    traffic = [row for row in report["rows"] if row["size"]["rounds"] > 1]
    for row in traffic:
        assert row["output_tokens_per_second"] > 0 and "step_ms" not in row
        assert 0 < row["ttft_ms"] <= row["ttft_p90_ms"]
        assert 0 < row["token_ms"] <= row["token_p90_ms"]
    for row in report["rows"]:
        if row in traffic:
            continue
        assert 0 < row["ttft_ms"] <= row["ttft_p90_ms"] and row["prefill_tokens_per_second"] > 0
        of_step = 1e3 * row["size"]["requests"] / row["step_ms"]
        assert row["decode_tokens_per_second"] == pytest.approx(of_step)
    assert report["environment"]["versions"]["vllm"] == "0.24.0"
    assert "| ours | 2 x 64/8 |" in out and "| vllm-server | 1 x 70/8 |" in out
    assert "| ours | 2 x 40/3 * 2 |" in out and "| vllm-server | 2 x 40/3 * 2 |" in out
    assert "| 1 x 70/8 |" in out and "| 2 x 40/3 * 2 |" in out and "| ours-parity |" not in out
    for row in json.loads(file.read_text())["rows"]:
        size, rates = row["case"]["size"], row["decode_rates"]
        assert len(rates) == (0 if size["rounds"] > 1 else 5 if size["requests"] == 1 else 1)
    assert ServingReport.read(file).summary()["rows"] == report["rows"]


def test_what_fails_is_an_error_of_its_rows(tmp_path, capsys):
    vllm = fake_vllm(tmp_path / "vllm", late=1)
    (vllm / "vllm" / "entrypoints" / "cli" / "main.py").write_text("raise ValueError('no GPU')")
    options = ["--vllm", str(vllm), "--implementations", "vllm,vllm-server", "--rows", "1x8/6"]
    code, report, _ = run(capsys, *options)
    assert code == 1
    first, second = report["rows"]
    assert "request 0 generated 7 tokens instead of 6" in first["error"]
    assert "vllm-server has ended" in second["error"] and "ValueError: no GPU" in second["error"]


class TestTimeline:
    def test_figures(self):
        """Two requests; the second waits for the first one's prompt."""
        timeline = Timeline(burst(2, 6))
        timeline.sent = [0.5, 0.5]
        timeline.arrivals = [[(first + step, 1) for step in range(6)] for first in (1.0, 2.0)]
        # All have begun at 2, and the first ends at 6: four steps of two tokens.
        assert timeline.figures() == {
            "ttft_ms": 1500,
            "ttft_mean_ms": 1500,
            "ttft_p90_ms": 2000,
            "input_tokens_per_second": 5.0,
            "decode_tokens_per_second": 2.0,
        }

    def test_no_time_with_all_of_them_is_no_rate(self):
        timeline = Timeline(burst(2, 6))
        timeline.arrivals = [[(first + step, 1) for step in range(6)] for first in (1.0, 5.0)]
        assert timeline.figures()["decode_tokens_per_second"] is None

    def test_a_wrong_number_of_tokens(self):
        timeline = Timeline(burst(1, 2))
        timeline.arrivals[0].append((1.0, 1))
        with pytest.raises(RuntimeError, match="request 0 generated 1 tokens instead of 2"):
            timeline.figures()

    def test_figures_of_traffic(self):
        """Two at a time; the third is sent when the first has ended."""
        some = Burst(1, 5, 4, 0.0, 1, 250, rounds=3)
        timeline = Timeline(some)
        for number, output in enumerate(some.outputs()):
            timeline.sent[number] = 10.0 * number
            first = 10.0 * number + 1 + number
            came = [(first + token * (2 + number), 1) for token in range(output)]
            timeline.arrivals[number] = came
        figures, last = timeline.figures(), some.outputs()[-1]
        assert figures["ttft_ms"] == figures["ttft_mean_ms"] == 2000
        assert figures["ttft_p90_ms"] == 3000
        assert figures["token_ms"] == 3000 and figures["token_p90_ms"] == 4000
        seconds = 23 + 4 * (last - 1)
        assert figures["output_tokens_per_second"] == sum(some.outputs()) / seconds

    def test_percentile(self):
        assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
        assert percentile([1], 0.9) == 1 and percentile([1, 2, 3], 0.5) == 2


def test_sizes_of_traffic_are_drawn_from_half_to_one_and_a_half():
    some = Burst(100, 7, 4, 0.0, 3, 50, rounds=4)
    prompts, outputs = some.prompts(), some.outputs()
    assert len(prompts) == len(outputs) == some.total == 400
    assert {*map(len, prompts)} == {4, 5, 6, 7, 8, 9, 10} and {*outputs} == {2, 3, 4, 5, 6}
    # What is drawn besides does not change them.
    assert [(len(p), o) for p, o in zip(prompts, outputs)] == some.sizes()
    assert Burst(100, 7, 4, 1.0, 4, 50, rounds=4).outputs() != outputs
    assert Burst(2, 7, 4, 0.0, 3, 50).sizes() == [(7, 4)] * 2


class OneToken:
    """An engine whose requests get one token each in a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.sent, self.running = [], []

    def add(self, name, prompt, new_tokens, temperature):
        self.left[name] = new_tokens
        self.sent.append((len(prompt), new_tokens))

    def is_busy(self):
        return bool(self.left)

    def step(self):
        self.running.append(len(self.left))
        grown = [(name, 1) for name in self.left]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return grown


class TestDriving:
    def test_one_takes_the_place_of_each_that_ends(self):
        some, engine = Burst(3, 6, 8, 0.0, 1, 50, rounds=3), OneToken()
        figures = engines.run(engine, some)
        assert engine.sent == some.sizes() and figures["output_tokens_per_second"] > 0
        # All places are taken until none waits.
        assert engine.running == sorted(engine.running, reverse=True)
        assert sum(engine.running) == sum(some.outputs()) and engine.running.count(3) > 16

    def test_all_arrive_at_once(self):
        engine = OneToken()
        assert engines.run(engine, burst(3, 8))["decode_tokens_per_second"] > 0
        assert engine.running == [3] * 8


def test_outputs_of_a_warm_up_last_until_all_prompts_are_read():
    """16 steps of 8,192 tokens, and 8 that only decode; shorter prompts where they are too many."""
    made = object.__new__(ServingBenchmark)
    for row, expected in (
        ("128x1k/256", Size(128, 1024, 24)),
        ("64x1k/256*4", Size(64, 1024, 24, 2)),
        ("128x1k/4", Size(128, 1024, 4)),
        ("128x8k/256", Size(128, 1024, 24)),
    ):
        words = ["--implementations", "ours", "--max-num-batched-tokens", "8192", "--rows", row]
        made.args = ServingBenchmark.parse([*TINY, *words])
        assert made._mixed(made.args.rows[0]) == expected


def test_both_are_ready_before_one_is_measured(tmp_path, monkeypatch):
    """Also if one of them fails to start, which is an error of its own rows."""
    seen = []

    class Fake(contenders.Contender):
        def __init__(self, name):
            self.name, self.start_seconds = name, 1.0

        def await_ready(self, limit):
            seen.append(f"{self.name} awaited")
            if self.name == "vllm":
                raise contenders.ContenderError("vllm has ended")

        def run(self, burst, limit):
            seen.append(self.name)
            timeline = Timeline(burst)
            timeline.arrivals = [[(1.0 + n, 1) for n in range(new)] for new in burst.outputs()]
            return timeline.figures()

        def close(self):
            pass

    monkeypatch.setattr(serving_script, "start", lambda name, *_: Fake(name))
    monkeypatch.setattr(serving_script, "write_model", lambda *_: CONFIG)
    vllm = fake_vllm(tmp_path / "vllm")
    argv = [*TINY, "--implementations", "ours,vllm", "--rows", "2x8/6", "--vllm", str(vllm)]
    first, second = ServingBenchmark(ServingBenchmark.parse(argv)).rows()
    assert seen[:3] == ["ours awaited", "vllm awaited", "ours"]
    assert not first.error and "vllm has ended" in second.error


@needs.no_gpu
@pytest.mark.usefixtures("forked_python")
def test_adapters(capsys):
    """Every request has one that the model takes."""
    code, report, _ = run(capsys, "--implementations", "ours-lora", "--rows", "3x64/8")
    assert code == 0 and report["rows"][0]["decode_tokens_per_second"] > 0


def test_parity_mode_is_an_option_of_the_same_engine(monkeypatch):
    given = []
    monkeypatch.setattr("absorbed_mla.LLM", lambda *_, **options: given.append(options))
    for name in ("ours", "ours-parity", "ours-parity-parts"):
        engines.ENGINES[name](TestSettings().made("--rows", "3x64/8"))
    default, parity, by_parts = given
    assert "parity" not in default and parity == {**default, "parity": True}
    assert by_parts == {**parity, "tensor_parallel_parts": 8}


class TestServerPackages:
    def test_what_is_missing_is_named(self, monkeypatch):
        monkeypatch.setattr(contenders, "_OUR_SERVER_NEEDS", ("starlette", "no_such_package"))
        argv = [*TINY, "--implementations", "ours-server", "--rows", "1x8/6"]
        with pytest.raises(ValueError, match="ours-server needs no_such_package, not installed"):
            ServingBenchmark.parse(argv)

    def test_a_folder_is_searched_last(self, tmp_path, monkeypatch):
        """It may hold another version of what is installed."""
        (tmp_path / "only_there.py").touch()
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ValueError('another torch')")
        monkeypatch.setattr(contenders, "_OUR_SERVER_NEEDS", ("only_there",))
        assert contenders.missing_for_our_server(None) == ["only_there"]
        assert contenders.missing_for_our_server(tmp_path) == []
        made = TestSettings().made("--rows", "3x64/8")
        command = contenders.server_command("ours-server", made, 8123, "model", tmp_path)
        program = command[command.index("-c") + 1]
        assert program.index("sys.path.append") < program.index("import main")
        program = program.partition("from absorbed")[0] + "import only_there, torch"
        subprocess.run([sys.executable, "-P", "-c", program], check=True)


class TestStreams:
    def test_traffic(self):
        with serving() as served:
            served.runner.step_seconds = 0.001
            some = Burst(2, 5, 4, 0.0, 1, 250, rounds=3)
            figures = streams.run(served.port, "tiny", some, 10)
            assert figures["output_tokens_per_second"] > 0 and figures["token_ms"] > 0

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
        # Behind the bytes.
        words = [tokenizer.decode([token]) for token in range(258, 3000)]
        assert len(tokenizer) == len({*words}) + 258 == 3000 and tokenizer.eos_token_id == 1
        assert all(word[0] == " " and word[1:].isalpha() for word in words)

    def test_a_folder_with_another_model(self, tmp_path):
        choice = Choice(layers=1, experts=2, vocab_size=64, scale_down=32)
        config = write_model(tmp_path / "model", choice)
        assert write_model(tmp_path / "model", choice) == config
        assert token_bytes(config) == 2 * (512 // 32 + 64)
        with pytest.raises(ValueError, match="holds another model"):
            write_model(tmp_path / "model", dataclasses.replace(choice, vocab_size=65))


class TestSettings:
    def made(self, *options: str) -> Settings:
        args = ServingBenchmark.parse([*TINY, "--implementations", "ours", *options])
        config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 8}
        return settings(args, config, Path("model"), "cuda")

    def test_the_cache_holds_every_row(self):
        made = self.made("--rows", "1x8k/256,100x1k/256")
        assert made.max_model_len == 8448 and made.max_num_seqs == 100
        assert made.cache_tokens >= 100 * 1344 and made.token_bytes == 8 * 576 * 2
        assert made.sizes == (1, 100) and made.captured == [1, 2, 4, 8, 16, 32, 64, 100]
        assert made.graphs
        assert Settings.read(made.text()) == made
        traffic = self.made("--rows", "100x1k/256*4")
        assert traffic.max_model_len == 1536 + 384 and traffic.cache_tokens >= 100 * 1920

    def test_steps_of_both_hold_the_same_number_of_tokens(self):
        made = self.made("--rows", "3x64/8")
        ours = LLMOptions(
            max_num_seqs=made.max_num_seqs, max_num_batched_tokens=made.max_num_batched_tokens
        )
        assert engines.vllm_options(made)["max_num_batched_tokens"] == ours.step_tokens

    def test_our_server_takes_what_it_is_given(self):
        made = self.made("--rows", "3x64/8")
        command = contenders.server_command("ours-server", made, 8123, "model")
        args = cli.build_parser().parse_args(command[command.index("-m") + 2 :])
        options = LLMOptions(**given_options(args, LLMOptions))
        assert options.cuda_graphs and not options.enable_prefix_caching
        assert options.cache_tokens == made.cache_tokens and options.max_num_seqs == 3
        assert options.max_model_len == made.max_model_len and args.port == 8123
