"""scripts/checks/long_life.py on a CPU: a short life without faults, and faults that it finds."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from checks import long_life
from checks.life import census, engine
from checks.life.census import growth
from checks.life.requests import answered
from checks.life.traffic import Fault, Traffic
from tests.support import needs

pytestmark = needs.no_gpu


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """Engines around one model, and requests with their answers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with batch_invariant_mode():
        folder = tmp_path_factory.mktemp("life")
        engines = engine.Engines(folder, "dense", ByteTokenizer(), 1)
        alone = engines.alone()
        pool = [entry for i in range(9) for entry in answered(alone, f"65/{i}", engines.adapters)]
        alone.close()
        yield SimpleNamespace(engines=engines, pool=pool)
    torch.set_num_threads(threads)


@pytest.fixture
def traffic(life):
    llm = life.engines.mixed()
    yield Traffic(llm, life.pool, "1/0", 0.3)
    llm.close()


def run(traffic: Traffic, requests: int, every: int) -> None:
    traffic.run([every] * (requests // every), time.monotonic() + 600, lambda: None)


def test_a_short_life(traffic):
    run(traffic, 150, 30)
    counts = Counter(traffic.report()["counts"])
    assert traffic.faults == growth(traffic.ended, traffic.figures) == []
    assert counts["ended"] == traffic.requests >= 150
    assert [name for name in long_life._EXPECTED if not counts[name]] == []
    assert counts["outputs, abort"] > 20


def test_the_answer_of_a_neighbour(traffic, monkeypatch):
    step = traffic._llm._runner.step

    def exchanged(commands):
        found = step(commands)
        if len(found) > 2:
            found[1].tokens, found[2].tokens = found[2].tokens, found[1].tokens
        return found

    monkeypatch.setattr(traffic._llm._runner, "step", exchanged)
    with pytest.raises(Fault, match="too many faults"):
        run(traffic, 60, 60)
    assert "alone CompletionOutput" in traffic.faults[0] and "prompt [" in traffic.faults[0]


def test_a_leaked_block(traffic):
    traffic._engine.host.context.kv_block_allocator.allocate_memory_blocks(1)
    with pytest.raises(Fault, match="after 2 requests: blocks"):
        run(traffic, 2, 2)


def test_a_step_that_raises(traffic, monkeypatch):
    monkeypatch.setattr(traffic._llm._runner, "step", lambda commands: [][0])
    with pytest.raises(Fault, match=r"a step of requests \[0.*\] raises .*\n[^$]*IndexError"):
        run(traffic, 2, 2)


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([0, 60, 120, 180, 240, 300], True),
        ([300, 60, 60, 60, 60, 60], False),
        ([1, 4, 4, 4, 6, 6], False),
        ([0, 0, 0, 0, 3, 3], True),
        # A table that fills, and one that goes on.
        ([0, 0, 0, 4, 12, 18, 22, 24, 24], False),
        ([0, 0, 0, 4, 12, 18, 22, 27, 31], True),
    ],
)
def test_growth(values, grows):
    counts = range(60, 60 + 60 * len(values), 60)
    found = growth(counts, [{"Engine.results": value} for value in values])
    assert bool(found) == grows
    first = values[len(values) // 3]
    assert not grows or found[0].startswith(f"Engine.results: {first}, ..., {values[-1]}: ")


@pytest.mark.parametrize(
    ("kernels", "kinds", "grows"),
    [(1, 50, []), (60, 99, []), (1, 999, ["kinds of one kernel"]), (999, 1, ["kernels"])],
)
def test_growth_of_launches(kernels, kinds, grows):
    """Kinds of a kernel's launches fill up; one for each request does not."""
    figures = [Counter() for _ in range(9)]
    for count, found in zip(range(20, 200, 20), figures, strict=True):
        table = {(i % kernels, i // kernels % kinds): ((1, 2), 3) for i in range(count)}
        census._count(found, census._LAUNCHES, table)
    assert [line.split(": ")[1] for line in growth(range(60, 600, 60), figures)] == grows


def test_the_command(life, tmp_path, monkeypatch, capsys):
    """Its report, and the command that repeats what a process has found."""
    monkeypatch.setattr(engine, "Engines", lambda *_: life.engines)
    words = ["--requests", "5", "--pool", "2", "--every", "2"]
    assert long_life.main([*words, "--json", str(tmp_path / "life.json")]) == 1
    report, said = json.loads((tmp_path / "life.json").read_text()), capsys.readouterr().out
    assert report["requests"] == report["counts"]["ended"] == 5
    assert "none of the requests: evicted" in report["faults"]
    assert "5 requests, 0 faults" in said
    args = long_life._arguments(words)
    assert long_life._arguments(long_life._words(args, 0, 5)).process == 0
    one, other = (long_life._sizes(args, tmp_path) for _ in range(2))
    assert [next(one), next(other), next(one), *other, *one] == [2, 2, 1]
    for wrong in (["--aborted", "2"], ["--every", "0"], ["--process", "1"]):
        assert long_life.main(wrong) == 2
        assert f"{wrong[0]} must be" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert long_life.main(words) == 2
    assert "structured_outputs needs llguidance" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_processes(tmp_path, monkeypatch, capsys, code):
    """Reports of all are merged; one that breaks off is a failure."""
    stub = tmp_path / "stub.py"
    stub.write_text(
        "import json, sys; print('a log')\n"
        "words = dict(zip(sys.argv[1::2], sys.argv[2::2])); i = words['--process']\n"
        "report = {'requests': 5, 'counts': {'evicted': 1}, 'faults': [f'of {i}'], 'device': ''}\n"
        "open(f\"{words['--share']}/report-{i}.json\", 'w').write(json.dumps(report))\n"
        f"sys.exit({code})\n"
    )
    monkeypatch.setattr(long_life, "__file__", str(stub))
    assert long_life.main(["--processes", "2"]) == 1
    said = capsys.readouterr()
    if code:
        assert "a log" in said.out and "has ended with 3" in said.err
    else:
        shown = ('"requests": 10', '"evicted": 2', "of 0", "of 1")
        assert all(text in said.out for text in shown) and "2 faults" in said.err
