"""Wrong paths and --help: said at once, before torch is imported, and with what to do instead."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_conversion import cli, command_line

ROOT = Path(__file__).resolve().parents[2]
# Runs a command line, then says on stderr whether torch was imported for it.
RUN = (
    "import sys; from checkpoint_conversion.cli import main\n"
    "try: code = main(sys.argv[1:])\n"
    "except SystemExit as error: code = error.code\n"
    "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("convert", "--help"), 0),
        (("convert", "a"), 2),
        (("convert", "a", "b", "--to", "hf", "--norms", "fused"), 2),
        (("convert", "absent", "b", "--to", "hf"), 3),
        (("inspect", "absent"), 3),
        (("verify", "absent"), 3),
        (("verify", "SOURCE", "absent"), 3),
        (("convert", "SOURCE", "SOURCE", "--to", "hf"), 3),
        (("inspect", "SOURCE", "--hf-config", "absent"), 3),
        (("verify", "SOURCE", "--text", "absent"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_torch_is_not_imported(tiny_folder, tmp_path, words, code):
    """Its import takes longer than everything else that these do."""
    words = [str(tiny_folder) if word == "SOURCE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "False"


def refused(capsys, *words: object) -> str:
    """The message of a command line that is refused."""
    assert cli.main([*map(str, words)]) == cli.REFUSED
    return capsys.readouterr().err


def test_a_name_on_the_hub(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "convert", "deepseek-ai/DeepSeek-V2-Lite", "out", "--to", "absorbed")
    assert "hf download deepseek-ai/DeepSeek-V2-Lite --local-dir DeepSeek-V2-Lite" in err
    assert "hf download" not in refused(capsys, "inspect", "some/longer/path")
    assert "hf download" not in refused(capsys, "inspect", tmp_path / "absent")


@pytest.mark.parametrize("base", ["deepseek-ai/DeepSeek-V2-Lite", None, "no JSON"])
def test_a_peft_adapter(capsys, tmp_path, base):
    text = base if base == "no JSON" else json.dumps({"base_model_name_or_path": base})
    (tmp_path / "adapter_config.json").write_text(text)
    (tmp_path / "adapter_model.safetensors").touch()
    err = refused(capsys, "inspect", tmp_path)
    assert "is a PEFT adapter" in err and "merge_and_unload" in err
    assert "config.json (" not in err
    if base and base != "no JSON":
        assert base in err


def test_a_model_beside_an_adapter_is_read(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert cli.main(["inspect", str(folder)]) == cli.DONE


@pytest.mark.parametrize("option", ["--hf-config", "--text"])
@pytest.mark.parametrize(("path", "what"), [("absent", "does not exist"), (".", "is a folder")])
def test_files_that_are_given(capsys, tiny_folder, tmp_path, option, path, what):
    err = refused(capsys, "verify", tiny_folder, option, tmp_path / path)
    assert option in err and what in err


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_every_option_says_its_default(capsys, command):
    with pytest.raises(SystemExit):
        command_line.parse_arguments([command, "--help"])
    text = capsys.readouterr().out.partition("\nformats:")[0].partition("\nexit codes:")[0]
    options = re.split(r"\n  (?=--)", text.partition("--help")[2])[1:]
    assert len(options) >= 3
    for option in options:
        words = " ".join(option.split())
        assert "default" in words or "(required)" in words, words
