"""scripts/training/checkpoint.py: what saving a run takes."""

from __future__ import annotations

import psutil
from megatron.core.dist_checkpointing.strategies import filesystem_async

from training import checkpoint


def test_no_process_passes_on_what_was_written(monkeypatch):
    """Nor in a run that has saved before."""
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = psutil.Process().children()
    checkpoint._write_in_this_process()
    queue = filesystem_async.get_write_results_queue()
    queue.put("results")
    checkpoint._write_in_this_process()
    assert filesystem_async.get_write_results_queue().get_nowait() == "results"
    assert psutil.Process().children() == before


def test_releases_of_megatron_without_that_process(monkeypatch):
    monkeypatch.delattr(filesystem_async, "_results_queue")
    checkpoint._write_in_this_process()
    assert not hasattr(filesystem_async, "_results_queue")
