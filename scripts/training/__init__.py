"""The training example ``scripts/train.py``; start reading with ``run.py``."""
