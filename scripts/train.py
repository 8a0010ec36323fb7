"""Train a GPT with multi-head latent attention through Megatron's loop, on CPUs or GPUs.

    torchrun --nproc-per-node 2 scripts/train.py --preset tiny \
        --tensor-model-parallel-size 2 --sequence-parallel --train-iters 200 \
        --save checkpoints --save-interval 100 --metrics metrics.jsonl --plot loss.png

Megatron's arguments are taken, and ``--help`` lists those that it does not have. The data is the
source code of Python's standard library unless ``--data`` names a file or folder.
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
    from training.entry import main

    leave(main(sys.argv[1:]))
