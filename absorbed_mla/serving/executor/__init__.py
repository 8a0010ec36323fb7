"""Executors: one engine in this process, or ranks in processes of their own."""
