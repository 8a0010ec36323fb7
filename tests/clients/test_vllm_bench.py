"""vLLM's benchmark client: requests of both interfaces, all answered in full."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "completions"), ("openai-chat", "chat/completions")]
)
def test_a_benchmark(served, folder, tmp_path, backend, endpoint):
    words = f"bench serve --backend {backend} --endpoint /v1/{endpoint} --model tiny"
    words += f" --tokenizer {folder} --base-url {served.url} --dataset-name random"
    words += " --random-input-len 8 --random-output-len 8 --num-prompts 6 --max-concurrency 2"
    words += " --ignore-eos --save-result --save-detailed --result-filename result.json"
    command = [str(Path(sys.executable).with_name("vllm")), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["output_lens"] == [8] * 6
