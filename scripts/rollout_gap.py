"""Log-probabilities of sampled tokens: the rollout's beside those of the forward that trains.

    python scripts/rollout_gap.py --load checkpoints --use-checkpoint-args --json gap.json

The model samples continuations of the training text over Megatron's paged cache, in every form and
precision and in parity mode; its training forward then computes the same tokens again. Prints a
table, and rewrites the JSON after every row. Options of the model are those of rollout_train.py.
"""

if __name__ == "__main__":
    from console.script import start

    start("rollout.gap_entry")
