"""A runner of one process: when its engine starts, and when it captures graphs of prompts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.serving.executor import local
from absorbed_mla.serving.llm_options import LLMOptions


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What engines do, in order."""
    done: list[str] = []

    class Recorded:
        def __init__(self, model, options):
            done.append("made")

        def start(self):
            done.append("start")

        def capture(self):
            done.append("capture")

        def execute(self, commands):
            return []

    monkeypatch.setattr(local, "Engine", Recorded)
    return done


def test_of_a_checkpoint(events, monkeypatch):
    """Graphs of prompts are captured before there are requests, not again when it wakes."""
    checkpoint = SimpleNamespace(config=SimpleNamespace(vocab_size=8))
    model = SimpleNamespace(max_sequence_length=4)
    followed = []

    def open_model(folder, *, follow_links):
        followed.append(follow_links)
        return checkpoint

    monkeypatch.setattr(local, "open_model", open_model)
    for name, value in {
        "require_model": None,
        "join": torch.device("cpu"),
        "load_model": model,
        "engine_options": None,
    }.items():
        monkeypatch.setattr(local, name, lambda *_, value=value: value)
    made = local.LocalRunner.of_checkpoint(Path(), LLMOptions(follow_links=True), 0, 1, None)
    assert followed == [True]
    assert events == ["made", "start", "capture"]
    made.wake()
    assert events[3:] == ["start"]


def test_of_a_live_model(events):
    local.LocalRunner(None, None).wake()
    assert events == ["made", "start"]


def test_no_memory(events, monkeypatch):
    def refuse(self):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(local.Engine, "capture", refuse)
    options = SimpleNamespace(cache_tokens=4096)
    with pytest.raises(ValueError, match="a cache of 4096 tokens does not fit"):
        local.LocalRunner(None, options)._wake(capture=True)


def test_an_engine_that_did_not_start_is_closed(events, monkeypatch):
    def start(self):
        raise OSError("no such folder")

    monkeypatch.setattr(local.Engine, "start", start)
    for name in ("finish", "close"):
        monkeypatch.setattr(
            local.Engine, name, lambda self, name=name: events.append(name), raising=False
        )
    runner = local.LocalRunner(torch.nn.Module(), SimpleNamespace(num_cuda_graphs=0))
    with pytest.raises(OSError, match="no such folder"):
        runner.wake()
    runner.sleep()
    assert events == ["made", "finish", "close"]
