"""Implementations of the indexer's selection and loss: one file each, named as the option."""
