"""A process with one engine: reads bursts from stdin, one JSON a line, and answers with figures.

Usage: python -m benchmarks.served.worker NAME SETTINGS, with the settings as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from benchmarks.served.burst import Burst
from benchmarks.served.engines import ENGINES, run
from benchmarks.served.settings import Settings


def main(name: str, settings: str) -> None:
    """Serve bursts until stdin ends."""
    # Whatever libraries print goes to the log.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = ENGINES[name](Settings.read(settings))
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            try:
                answer = run(engine, Burst(**json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
