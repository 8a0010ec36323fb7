"""What ``scripts/rollout_train.py`` is made of; ``entry.py`` puts it together."""
