"""guidellm: a benchmark of synthetic prompts, whose requests are all answered in full."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")


def test_a_benchmark(served, folder, tmp_path):
    words = f"run --backend kind=openai_http,target={served.url},model=tiny"
    words += " --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6"
    words += f" --tokenizer kind=huggingface_auto,model={folder} --disable-progress"
    words += " --data kind=synthetic_text,prompt_tokens=8,output_tokens=8"
    command = [str(Path(sys.executable).with_name("guidellm")), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [found] = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": 6,
        "errored": 0,
        "incomplete": 0,
        "total": 6,
    }
    assert {one["output_tokens"] for one in found["requests"]["successful"]} == {8}
