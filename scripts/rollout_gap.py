"""Log-probabilities of sampled tokens: the rollout's beside those of the forward that trains.

    python scripts/rollout_gap.py --load checkpoints --use-checkpoint-args --json gap.json

The model samples continuations of the training text over Megatron's paged cache, in every form and
precision and in parity mode; its training forward then computes the same tokens again. Prints a
table, and rewrites the JSON after every row. Options of the model are those of rollout_train.py.
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
    from rollout.gap_entry import main

    leave(main(sys.argv[1:]))
