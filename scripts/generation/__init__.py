"""The parts of ``scripts/generate.py``; ``entry.py`` puts them together."""
