"""Sampling: parameters, filters and draws of the next token of every request."""
