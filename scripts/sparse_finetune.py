"""From a dense model to a sparse one: train, warm an indexer up, train sparse, and compare.

    python scripts/sparse_finetune.py --output sparse_output

Trains a small dense model on texts that count in words. Then it goes on in two ways, on the same
batches: dense, and with sparse attention whose indexer has warmed up. On held-out text it measures
the recall of the indexer's choice and the losses, and draws both. Every stage is a run of train.py,
whose command is printed.
"""

if __name__ == "__main__":
    from console.script import start

    start("sparse.entry")
