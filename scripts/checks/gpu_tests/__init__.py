"""Tests on a GPU machine: which, side by side in which processes, and what became of them."""
