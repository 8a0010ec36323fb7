"""A server around a fake model in a process of its own, whose steps take 20 ms, until stdin ends.

Its tokenizer is one of Hugging Face's, which takes seconds for a text of megabytes.
"""

import sys

from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
from tests.support.llm import serving
from tests.support.tokenizers import byte_level

STEP_SECONDS = 0.02

if __name__ == "__main__":
    quiet = {"access_log": False}
    tokenizer = open_tokenizer(byte_level(), None)
    with serving(http_options=quiet, tokenizer=tokenizer) as served:
        served.runner.step_seconds = STEP_SECONDS
        sys.setswitchinterval(0.0005)
        print(served.port, flush=True)
        sys.stdin.read()
