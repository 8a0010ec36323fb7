"""The command line: exit codes, messages, and what scripts and people read.

Wrong paths and ``--help`` are answered before torch is imported.
"""

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
from tests.conversion.support import change_json, read, write_model

ROOT = Path(__file__).resolve().parents[2]
# Runs a command line, then says on stderr whether torch was imported for it.
RUN = (
    "import sys; from checkpoint_conversion.cli import main\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as error: code = error.code\n"
    "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "source", num_nextn_predict_layers=1)


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


@pytest.fixture
def refused(run):
    """Runs a command line that is refused; gives its message."""

    def refused(*args: object) -> str:
        code, _, err = run(*args)
        assert code == cli.REFUSED
        return err

    return refused


@pytest.fixture
def convert_json(run, source, tmp_path):
    """Converts the source to ``hf`` with further words; gives the document on stdout."""

    def convert_json(*words: str) -> dict:
        code, out, _ = run("convert", source, tmp_path / "json", "--to", "hf", *words, "--json")
        assert code == 0
        return one_document(out)

    return convert_json


def one_document(out: str) -> dict:
    (line,) = out.splitlines()
    return json.loads(line)


class TestConvert:
    def test_done(self, run, source, tmp_path):
        code, out, err = run("convert", source, tmp_path / "out", "--to", "hf")
        assert (code, err) == (0, "")
        for word in ("source", "target", "parameters", "peak memory", "bfloat16", "/s"):
            assert word in out

    def test_json(self, convert_json):
        document = convert_json()
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

    def test_left_out_and_fp8_errors_are_in_the_summary(self, run, source, tmp_path, convert_json):
        words = ("--to", "hf", "--exclude-mtp", "--fp8", "ue8m0")
        _, out, _ = run("convert", source, tmp_path / "out", *words)
        assert re.search(r"left out +3\d tensors: --exclude-mtp", out)
        assert "MTP layers left out: 1 (--exclude-mtp)" in out
        assert "of quantised values" in out and "root mean square, in model.layers." in out
        errors = convert_json("--fp8", "float")["fp8_errors"]
        assert 0.001 < errors["rms"] < 0.05
        assert errors["tensors"] > 10

    def test_dtype(self, convert_json):
        assert set(convert_json("--dtype", "fp32")["dtypes"]) == {"float32"}


class TestRefused:
    """Wrong paths: said at once, and with what to do instead."""

    def test_no_checkpoint(self, refused, tmp_path):
        (tmp_path / "thesis.tex").touch()
        err = refused("convert", tmp_path, tmp_path.parent / "out", "--to", "hf")
        for part in ("thesis.tex", ".metadata", "model_optim_rng.pt", "safetensors"):
            assert part in err

    def test_what_is_there_is_said(self, refused, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        for path, what in (("absent", "does not exist"), ("file", "is a file"), ("empty", "is em")):
            assert what in refused("inspect", tmp_path / path)

    @pytest.mark.parametrize("change", ["no config.json", "another folder in it"])
    def test_force_needs_a_whole_checkpoint_and_nothing_else(
        self, refused, source, tmp_path, change
    ):
        target = tmp_path / "out"
        shutil.copytree(source, target)
        if change == "no config.json":
            (target / "config.json").unlink()
        else:
            (target / "Documents").mkdir()
        assert "--force" in refused("convert", source, target, "--to", "hf", "--force")
        assert any(target.glob("*.safetensors"))

    def test_source_as_target(self, refused, source):
        assert "same folder" in refused("convert", source, source, "--to", "hf", "--force")

    def test_config_for_a_checkpoint_that_has_one(self, refused, source, tmp_path):
        words = ("--to", "hf", "--hf-config", source / "config.json")
        assert "--hf-config" in refused("convert", source, tmp_path / "out", *words)

    def test_a_name_on_the_hub(self, refused, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        err = refused("convert", "deepseek-ai/DeepSeek-V2-Lite", "out", "--to", "absorbed")
        assert "hf download deepseek-ai/DeepSeek-V2-Lite --local-dir DeepSeek-V2-Lite" in err
        for path in ("some/longer/path", tmp_path / "absent"):
            assert "hf download" not in refused("inspect", path)

    @pytest.mark.parametrize("base", ["deepseek-ai/DeepSeek-V2-Lite", None, "no JSON"])
    def test_a_peft_adapter(self, refused, tmp_path, base):
        text = base if base == "no JSON" else json.dumps({"base_model_name_or_path": base})
        (tmp_path / "adapter_config.json").write_text(text)
        (tmp_path / "adapter_model.safetensors").touch()
        err = refused("inspect", tmp_path)
        assert "is a PEFT adapter" in err and "merge_and_unload" in err
        assert "config.json (" not in err
        if base and base != "no JSON":
            assert base in err

    def test_a_model_beside_an_adapter_is_read(self, run, tiny_folder, tmp_path):
        folder = shutil.copytree(tiny_folder, tmp_path / "model")
        (folder / "adapter_config.json").write_text("{}")
        assert run("inspect", folder)[0] == cli.DONE

    @pytest.mark.parametrize("option", ["--hf-config", "--text"])
    @pytest.mark.parametrize(("path", "what"), [("absent", "does not exist"), (".", "is a folder")])
    def test_files_that_are_given(self, refused, tiny_folder, tmp_path, option, path, what):
        err = refused("verify", tiny_folder, option, tmp_path / path)
        assert option in err and what in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("convert --help", 0),
        ("convert a", 2),
        ("convert a b --to hf --norms fused", 2),
        ("convert absent b --to hf", 3),
        ("inspect absent", 3),
        ("verify absent", 3),
        ("verify SOURCE absent", 3),
        ("convert SOURCE SOURCE --to hf", 3),
        ("inspect SOURCE --hf-config absent", 3),
        ("verify SOURCE --text absent", 3),
    ],
)
def test_torch_is_not_imported(tiny_folder, tmp_path, words, code):
    """Its import takes longer than everything else that these do."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words.replace("SOURCE", str(tiny_folder)).split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "False"


class TestWrongCommandLines:
    @pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.name)
    def test_flags_that_the_target_cannot_honour(self, run, flag, tmp_path):
        """Named, and never ignored."""
        value = "1MB" if flag.accepts is byte_count else "2"
        value = value if callable(flag.accepts) else flag.accepts[0]
        for to in set(TARGETS) - set(flag.formats):
            words = (tmp_path / "a", tmp_path / "b", "--to", to, flag.name, value)
            code, _, err = run("convert", *words)
            assert code == 2
            assert f"{flag.name} is for --to " in err and f"not for {to}" in err

    @pytest.mark.parametrize(
        "words",
        [
            *("", "reverse a b", "convert a", "convert a b", "inspect", "verify"),
            *("convert a b --to onnx", "convert a b --to megatron-legacy"),
            *(f"convert a b --to hf --workers {count}" for count in (0, -1, "²")),
            *(f"convert a b --to hf --max-shard-size {size}" for size in (0, "big", "5XB")),
            "convert a b --to hf --dtype int8",
            "convert a b --to megatron --make-vocab-size-divisible-by 0",
            *(f"verify a b --tolerance {value}" for value in (-1, "nan")),
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

    def test_sizes(self):
        sizes = {"5GB": 5 * 10**9, "1.5 kb": 1500, "2MiB": 2 << 20, "7": 7, "1B": 1}
        assert {text: byte_count(text) for text in sizes} == sizes


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
            config = open_checkpoint(source).config
            write_legacy(tmp_path / "out", config, read(source), tensor_parallel=2)
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
        change_json(tmp_path / "odd" / "config.json", kv_lora_rank=25)
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

    def test_missing_module(self, refused, source, monkeypatch):
        monkeypatch.setitem(sys.modules, "checkpoint_conversion.inspection", None)
        err = refused("inspect", source)
        assert "pip install" in err and "Traceback" not in err

    def test_names_cannot_steer_the_terminal(self, refused, tmp_path):
        (tmp_path / "\x1b[2Jclear").touch()
        err = refused("inspect", tmp_path)
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

    @pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
    def test_every_option_says_its_default(self, run, command):
        text = run(command, "--help")[1].partition("\nformats:")[0].partition("\nexit codes:")[0]
        options = re.split(r"\n  (?=--)", text.partition("--help")[2])[1:]
        assert len(options) >= 3
        for option in options:
            words = " ".join(option.split())
            assert "default" in words or "(required)" in words, words
        if command == "convert":
            assert {flag.name for flag in flags()} <= {option.split()[0] for option in options}

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
        assert stream.getvalue().splitlines() == [
            "44.0 MB of 100.0 MB, 2.0 MB/s, 28 s left",
            "68.0 MB of 100.0 MB, 2.0 MB/s, 16 s left",
        ]

    def test_sizes_for_people(self):
        sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2.5e9: "2.5 GB", 1.342e12: "1.34 TB"}
        assert {count: format_bytes(count) for count in sizes} == sizes
