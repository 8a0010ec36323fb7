"""From a dense model to a sparse one: train, warm an indexer up, train sparse, and compare.

    python scripts/sparse_finetune.py --output sparse_output

Trains a small dense model on texts that count in words. Then it goes on in two ways, on the same
batches: dense, and with sparse attention whose indexer has warmed up. On held-out text it measures
the recall of the indexer's choice and the losses, and draws both. Every stage is a run of train.py,
whose command is printed.
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
    from sparse.entry import main

    leave(main(sys.argv[1:]))
