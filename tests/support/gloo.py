"""One thread for the sockets of all process groups of a process, instead of one for each.

Gloo's threads wake up a hundred times a second. Megatron makes dozens of groups for each layout of
ranks, and tests have many layouts: without this the hundreds of idle threads of a few ranks take
most of a machine.
"""

import functools
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

_TIMEOUT = timedelta(minutes=30)  # that of PyTorch


class _GroupOfOneDevice(ProcessGroupGloo):
    """As PyTorch makes them, over this process's device."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta = _TIMEOUT) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@functools.cache
def _device(process: int) -> ProcessGroupGloo.Device:
    """Of this process: a forked one has none of the threads of the one that it was forked from."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def share_one_device() -> None:
    """From now on, for groups that this process makes by ``torch.distributed``."""
    distributed_c10d.ProcessGroupGloo = _GroupOfOneDevice
