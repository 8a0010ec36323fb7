"""The stages of sparse_finetune.py, what is measured of them, and their plot."""
