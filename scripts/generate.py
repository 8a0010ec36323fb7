"""Generate text with a checkpoint of train.py or of the conversion, on CPUs or GPUs.

    torchrun --nproc-per-node 2 scripts/generate.py --load checkpoints \
        --prompt "def main(" --num-tokens-to-generate 100 --temperature 0.7 --top-p 0.9

The engine is Megatron's (paged latent cache, chunked prefill, prefix cache); the model is the one
that train.py trains. Prompts come from the command line, a file or stdin, and run together; the
text of the first one that has not ended is shown while it grows. Exit code: 0; 1 if a prompt could
not be continued; 2 if nothing was started.
"""

import sys
import warnings
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    # Megatron warns about every optional package it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from console.script import leave
    from generation.entry import main

    leave(main(sys.argv[1:]))
