"""Checkpoint layouts, one file each: every difference from the default layout of ``layout.py``."""
