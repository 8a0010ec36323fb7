"""Tokenizers of requests, and text from generated tokens while they come."""
