"""The command line: exit codes, messages, and what scripts and people read."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_conversion import cli, command_line, convert, verify
from checkpoint_conversion.command_line import byte_count, flags
from checkpoint_conversion.formats import FORMATS, TARGETS, open_checkpoint
from checkpoint_conversion.progress import BarReporter, LineReporter, format_bytes, reporter_for
from tests.conversion.legacy_support import write_legacy
from tests.conversion.support import load_all, random_tensors, tiny_config, write_hugging_face

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    config = tiny_config(num_nextn_predict_layers=1)
    folder = tmp_path_factory.mktemp("cli") / "source"
    return write_hugging_face(folder, config, random_tensors(config))


@pytest.fixture
def run(capsys):
    """Runs a command line; gives exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


def one_document(out: str) -> dict:
    """The only thing on stdout."""
    (line,) = out.splitlines()
    return json.loads(line)


class TestConvert:
    def test_done(self, run, source, tmp_path):
        code, out, err = run("convert", source, tmp_path / "out", "--to", "hf")
        assert code == 0
        for word in ("source", "target", "parameters", "peak memory", "bfloat16", "/s"):
            assert word in out
        assert err == ""

    def test_json(self, run, source, tmp_path):
        code, out, _ = run("convert", source, tmp_path / "out", "--to", "hf", "--json")
        document = one_document(out)
        assert code == 0
        assert document["target"]["format"] == "hf"
        assert document["bytes_written"] == document["bytes"] > 0
        assert document["peak_rss"] > 0
        assert "plan" not in document

    def test_existing_target(self, run, source, tmp_path):
        command = ("convert", source, tmp_path / "out", "--to", "hf")
        assert run(*command)[0] == 0
        code, out, err = run(*command)
        assert (code, out) == (cli.REFUSED, "")
        assert err.startswith("error: the target") and "--force" in err
        code, out, _ = run(*command, "--json")
        assert code == one_document(out)["exit_code"] == cli.REFUSED
        assert "exists" in one_document(out)["error"]["message"]
        assert run(*command, "--force")[0] == 0
        assert run(*command, "--resume")[0] == 0

    def test_dry_run_prints_every_tensor_and_writes_nothing(self, run, source, tmp_path):
        command = ("convert", source, tmp_path / "out", "--to", "hf", "--dry-run", "--exclude-mtp")
        code, out, _ = run(*command)
        assert code == 0
        assert out.startswith("source ")
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        assert f"{name} [16, 32] bfloat16 <- {name}" in out
        assert "left out: model.layers.3.enorm.weight (--exclude-mtp)" in out
        (part,) = one_document(run(*command, "--json")[1])["plan"]
        planned = [tensor["key"] for tensor in part["tensors"]]
        kept = open_checkpoint(source).hugging_face_tensors()
        assert sorted(planned) == sorted(n for n in kept if not n.startswith("model.layers.3."))
        assert all(f"{name} [" in out and f"<- {name}" in out for name in planned)
        assert list(tmp_path.iterdir()) == []

    def test_left_out_is_in_the_summary(self, run, source, tmp_path):
        _, out, _ = run("convert", source, tmp_path / "out", "--to", "hf", "--exclude-mtp")
        assert re.search(r"left out +3\d tensors: --exclude-mtp", out)
        assert "MTP layers left out: 1 (--exclude-mtp)" in out

    def test_fp8_errors_are_in_the_summary(self, run, source, tmp_path):
        _, out, _ = run("convert", source, tmp_path / "out", "--to", "hf", "--fp8", "ue8m0")
        assert "FP8 errors" in out and "root mean square, in model.layers." in out
        command = ("convert", source, tmp_path / "b", "--to", "hf", "--fp8", "float", "--json")
        errors = one_document(run(*command)[1])["fp8_errors"]
        assert 0.001 < errors["rms"] < 0.05
        assert errors["tensors"] > 10

    def test_dtype(self, run, source, tmp_path):
        command = ("convert", source, tmp_path / "out", "--to", "hf", "--dtype", "fp32", "--json")
        assert set(one_document(run(*command)[1])["dtypes"]) == {"float32"}

    def test_no_checkpoint(self, run, tmp_path):
        (tmp_path / "thesis.tex").touch()
        code, _, err = run("convert", tmp_path, tmp_path.parent / "out", "--to", "hf")
        assert code == cli.REFUSED
        assert "thesis.tex" in err
        for looked_for in (".metadata", "model_optim_rng.pt", "safetensors"):
            assert looked_for in err

    @pytest.mark.parametrize("path", ["absent", "file", "empty"])
    def test_what_is_there_is_said(self, run, tmp_path, path):
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        code, _, err = run("inspect", tmp_path / path)
        expected = {"absent": "does not exist", "file": "is a file", "empty": "is empty"}
        assert code == cli.REFUSED and expected[path] in err

    @pytest.mark.parametrize("change", ["no config.json", "another folder in it"])
    def test_force_needs_a_whole_checkpoint_and_nothing_else(self, run, source, tmp_path, change):
        target = tmp_path / "out"
        shutil.copytree(source, target)
        if change == "no config.json":
            (target / "config.json").unlink()
        else:
            (target / "Documents").mkdir()
        code, _, err = run("convert", source, target, "--to", "hf", "--force")
        assert code == cli.REFUSED and "--force" in err
        assert any(target.glob("*.safetensors"))

    def test_source_as_target(self, run, source):
        code, _, err = run("convert", source, source, "--to", "hf", "--force")
        assert code == cli.REFUSED and "same folder" in err

    def test_config_for_a_checkpoint_that_has_one(self, run, source, tmp_path):
        config = source / "config.json"
        target = tmp_path / "out"
        code, _, err = run("convert", source, target, "--to", "hf", "--hf-config", config)
        assert code == cli.REFUSED and "--hf-config" in err


class TestWrongCommandLines:
    @pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.name)
    def test_flags_that_the_target_cannot_honour(self, run, flag, tmp_path):
        """Named, and never ignored."""
        value = "1MB" if flag.accepts is byte_count else "2"
        value = value if callable(flag.accepts) else flag.accepts[0]
        for to in set(TARGETS) - set(flag.formats):
            code, _, err = run(
                "convert", tmp_path / "a", tmp_path / "b", "--to", to, flag.name, value
            )
            assert code == 2
            assert f"{flag.name} is for --to " in err and f"not for {to}" in err

    @pytest.mark.parametrize(
        "words",
        [
            "",
            "reverse a b",
            "convert a",
            "convert a b",
            "convert a b --to onnx",
            "convert a b --to hf --workers 0",
            "convert a b --to hf --workers -1",
            "convert a b --to hf --workers ²",
            "convert a b --to hf --max-shard-size 0",
            "convert a b --to hf --max-shard-size big",
            "convert a b --to hf --max-shard-size 5XB",
            "convert a b --to hf --dtype int8",
            "convert a b --to megatron-legacy",
            "convert a b --to megatron --make-vocab-size-divisible-by 0",
            "inspect",
            "verify",
            "verify a b --tolerance -1",
            "verify a b --tolerance nan",
        ],
    )
    def test_exit_with_2(self, run, words):
        code, out, err = run(*words.split())
        assert (code, out) == (2, "")
        assert err.startswith("absorbed-mla-convert") and ": error: " in err
        assert err.count("\n") == 1 and "--help" in err

    @pytest.mark.parametrize("to", ["megatron-legacy", "onnx"])
    def test_formats_that_can_be_written_are_named(self, run, to):
        err = run("convert", "a", "b", "--to", to)[2]
        assert "--to can be hf, megatron, absorbed" in err
        assert ("can be read, not written" in err) == (to == "megatron-legacy")

    @pytest.mark.parametrize(
        ("text", "count"),
        [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), ("7", 7), ("1B", 1)],
    )
    def test_sizes(self, text, count):
        assert byte_count(text) == count


class TestInspect:
    def test_one_screen(self, run, source):
        code, out, _ = run("inspect", source)
        assert code == 0
        assert len(out.splitlines()) < 40
        for word in ("deepseek_v3", "1 dense, 2 MoE", "1 for multi-token", "kv_lora_rank 24", "hf"):
            assert word in out

    def test_json(self, run, source):
        document = one_document(run("inspect", source, "--json")[1])
        assert document["model"]["experts"] == 4
        assert document["model"]["mtp_layers"] == 1
        assert document["dtypes"]["bfloat16"]["tensors"] > 50
        assert document["parameters"] > 0
        assert document["problems"] == []

    @pytest.mark.parametrize("to", FORMATS)
    def test_every_format(self, run, source, tmp_path, to):
        """The same model, and with per-rank files the parallel sizes."""
        if to in TARGETS:
            assert run("convert", source, tmp_path / "out", "--to", to)[0] == 0
        else:
            checkpoint = open_checkpoint(source)
            tensors = load_all(checkpoint.hugging_face_tensors())
            write_legacy(tmp_path / "out", checkpoint.config, tensors, tensor_parallel=2)
        code, out, _ = run("inspect", tmp_path / "out")
        assert code == 0
        assert len(out.splitlines()) < 40
        assert re.search(rf"^format +{to}$", out, re.MULTILINE)
        assert to in TARGETS or "tensor_parallel 2" in out
        before, after = (
            one_document(run("inspect", path, "--json")[1]) for path in (source, tmp_path / "out")
        )
        assert before["parameters"] == after["parameters"]
        assert before["model"] == after["model"]

    def test_manifest(self, run, source, tmp_path):
        run("convert", source, tmp_path / "out", "--to", "hf")
        assert "xxh3_128 checksums" in run("inspect", tmp_path / "out")[1]
        (tmp_path / "out" / "conversion_manifest.json").write_text("{}")
        code, out, _ = run("inspect", tmp_path / "out")
        assert code == cli.REFUSED and "damaged" in out

    def test_tensors_that_do_not_fit_are_shown_with_the_rest(self, run, source, tmp_path):
        shutil.copytree(source, tmp_path / "odd")
        config = json.loads((source / "config.json").read_text())
        config["kv_lora_rank"] = 25
        (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
        code, out, _ = run("inspect", tmp_path / "odd")
        assert code == cli.REFUSED
        assert "kv_a_layernorm" in out and "deepseek_v3" in out and "more (--json)" in out
        document = one_document(run("inspect", tmp_path / "odd", "--json")[1])
        assert len(document["problems"]) > 10
        assert document["parameters"] is None


class TestVerify:
    @pytest.fixture
    def asked(self, monkeypatch) -> dict:
        """Arguments of the verification that the command line asks for, which finds nothing."""
        asked: dict = {}

        class Report:
            accepted = True

            def as_json(self):
                return {"command": "verify"}

            def lines(self):
                yield "equal"

        def fake(a, b, **how):
            asked.update(how, a=a, b=b)
            return Report()

        monkeypatch.setattr(verify, "verify", fake)
        # Its paths are nowhere.
        monkeypatch.setattr(cli, "check_paths", lambda args: None)
        asked["report"] = Report
        return asked

    def test_defaults_are_those_of_the_function(self, run, asked):
        assert run("verify", "a", "b") == (0, "equal\n", "")
        assert (asked["a"], asked["b"]) == (Path("a"), Path("b"))
        assert not {"logits", "logits_tolerance", "max_tokens"} & asked.keys()

    def test_options(self, run, asked):
        words = "--no-logits --logits-tolerance 1e-3 --max-tokens 7 --text t --tolerance 0.5"
        assert run("verify", "a", *words.split(), "--json")[0] == 0
        assert asked["b"] is None
        assert asked["logits"] is False
        assert (asked["logits_tolerance"], asked["max_tokens"]) == (1e-3, 7)
        assert (asked["text"], asked["tolerance"]) == (Path("t"), 0.5)

    def test_differences(self, run, asked):
        asked["report"].accepted = False
        assert run("verify", "a", "b")[0] == cli.DIFFERENT


class TestFailures:
    def test_bug(self, run, source, tmp_path, monkeypatch):
        monkeypatch.setattr(convert, "plan_conversion", lambda *args: 1 / 0)
        code, _, err = run("convert", source, tmp_path / "out", "--to", "hf")
        assert code == cli.BUG
        assert "Traceback" in err and "ZeroDivisionError" in err and "report it" in err

    def test_missing_module(self, run, source, monkeypatch):
        monkeypatch.setitem(sys.modules, "checkpoint_conversion.inspection", None)
        code, _, err = run("inspect", source)
        assert code == cli.REFUSED and "pip install" in err and "Traceback" not in err

    def test_names_cannot_steer_the_terminal(self, run, tmp_path):
        (tmp_path / "\x1b[2Jclear").touch()
        code, _, err = run("inspect", tmp_path)
        assert code == cli.REFUSED
        assert "\x1b" not in err and "\\x1b[2Jclear" in err

    def test_reader_of_the_output_goes_away(self, source, tmp_path):
        words = [sys.executable, "-m", "checkpoint_conversion", "convert", source, tmp_path / "out"]
        command = shlex.join(map(str, words)) + " --to hf --dry-run | true"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


class TestHelp:
    @pytest.mark.parametrize("command", [[], ["convert"], ["inspect"], ["verify"]])
    def test_help(self, run, command):
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert "exit codes:" in out
        for code in ("0", "1", "2", "3", "4", "70", "130"):
            assert f"\n  {code:<4} " in out

    def test_every_flag_is_explained(self, run):
        _, out, _ = run("convert", "--help")
        for flag in flags():
            assert flag.name in out
            assert flag.help

    def test_as_a_module(self):
        command = [sys.executable, "-m", "checkpoint_conversion", "--version"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip() == command_line.__version__


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    def test_bar_only_on_a_terminal(self):
        assert isinstance(reporter_for(Terminal()), BarReporter)
        assert isinstance(reporter_for(io.StringIO()), LineReporter)

    def test_lines_without_rich(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert isinstance(reporter_for(Terminal()), LineReporter)

    def test_bar_shows_bytes_speed_and_time(self, monkeypatch):
        monkeypatch.setattr(os, "environ", {**os.environ, "TERM": "xterm", "COLUMNS": "120"})
        stream = Terminal()
        reporter = reporter_for(stream)
        reporter.start(4_000_000, 1_000_000)
        for _ in range(3):
            reporter.advance(1_000_000)
        reporter.say("[half] way")
        reporter.finish()
        text = stream.getvalue()
        assert "4.0/4.0 MB" in text and "B/s" in text and "0:00:00" in text
        assert "[half] way" in text

    def test_lines_now_and_then(self, monkeypatch):
        clock = [100.0]
        monkeypatch.setattr("time.monotonic", lambda: clock[0])
        stream = io.StringIO()
        reporter = LineReporter(stream)
        reporter.start(100_000_000, 20_000_000)
        for _ in range(4):
            clock[0] += 6
            reporter.advance(12_000_000)
        lines = [
            "44.0 MB of 100.0 MB, 2.0 MB/s, 28 s left",
            "68.0 MB of 100.0 MB, 2.0 MB/s, 16 s left",
        ]
        assert stream.getvalue().splitlines() == lines

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (1.342e12, "1.34 TB")],
    )
    def test_sizes_for_people(self, count, text):
        assert format_bytes(count) == text
