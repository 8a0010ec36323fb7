"""Ours beside peers, read from the recorded results under docs/."""
