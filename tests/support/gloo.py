"""One network device for all gloo groups of a process.

By itself every group has a device with a thread that wakes up 100 times a second. The tests create
hundreds of groups in a process, whose idle threads took most of two cores (torch 2.13: 100 idle
groups take 13 % of one).
"""

from __future__ import annotations

import torch.distributed as dist


def share_device() -> None:
    """Let all gloo groups made from now on share a device."""
    gloo = dist.ProcessGroupGloo
    device = gloo.create_default_device()
    init = gloo.__init__

    def with_shared_device(self, store, rank, size, timeout) -> None:
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timeout
        options._threads = 2  # torch's default
        init(self, store, rank, size, options)

    gloo.__init__ = with_shared_device
