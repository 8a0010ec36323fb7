"""Calls on a GPU as engines make them: recorded in a CUDA graph, and side by side on streams."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call, after one on a stream of its own that compiles its kernels; the result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def on_streams(call: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
    """What the last of five calls gives for each of these arguments, all of them on streams."""
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in arguments], [None for _ in arguments]
    for _ in range(5):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index] = call(*arguments[index])
    torch.cuda.synchronize()
    return found
