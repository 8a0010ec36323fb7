"""What ``scripts/train.py`` is made of; ``entry.py`` puts it together."""
