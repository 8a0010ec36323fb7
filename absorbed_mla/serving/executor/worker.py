"""One rank of a ``ProcessRunner``: a ``LocalRunner`` that does what it reads from a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection


def main(descriptor: int, folder_of_run: str) -> None:
    """Serve calls until the pipe ends, or an error does.

    Args:
        descriptor: Of the pipe to the process that started this one.
        folder_of_run: Where the ranks meet; removed if that process cannot do it any more.
    """
    _end_with_parent(folder_of_run)
    # Ctrl-C reaches all processes of a terminal; the one that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    connection = Connection(descriptor)
    try:
        folder, options, rank, world, store = connection.recv()
    except EOFError:
        return
    from absorbed_mla.cpu_host import enable_cpu_host

    enable_cpu_host()  # before anything imports Megatron, which is quicker then
    from absorbed_mla.serving.executor.multiprocess import picklable
    from absorbed_mla.serving.gc_freeze import leave_out_what_is_there

    try:
        import torch.distributed as dist

        from absorbed_mla.serving.executor.local import LocalRunner

        meeting = dist.FileStore(store, world)
        runner = LocalRunner.of_checkpoint(folder, options, rank, world, meeting)
        leave_out_what_is_there()
        connection.send(("done", None))
        while True:
            name, arguments = connection.recv()
            connection.send(("done", getattr(runner, name)(*arguments)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Closed by the other side, or that process has ended without cleaning up.
        shutil.rmtree(folder_of_run, ignore_errors=True)
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(("error", picklable(error)))
        # So that it arrives before this process ends.
        connection.close()
    # Without waiting for ranks that may have ended.
    os._exit(0)


def _end_with_parent(folder_of_run: str) -> None:
    """Ends this process when its parent does, wherever it waits then; beats each second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            # The heartbeat is the time of the log, which standard output is.
            with contextlib.suppress(OSError):
                os.utime(1)
            time.sleep(1)
        shutil.rmtree(folder_of_run, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
