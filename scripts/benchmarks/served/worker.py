"""A process with one engine: reads bursts from stdin, one JSON a line, and answers with figures.

Its arguments are the engine's name and the settings as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback

from benchmarks.served.burst import Burst
from benchmarks.served.engines import ENGINES, run
from benchmarks.served.settings import Settings


def main() -> None:
    """Serve bursts until stdin ends."""
    [name, settings] = sys.argv[1:]
    # Whatever libraries print goes to the log.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = ENGINES[name](Settings.read(settings))
        # Full collections would look at all that was imported, amid a burst.
        gc.freeze()
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            try:
                answer = run(engine, Burst(**json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
        engine.close()
