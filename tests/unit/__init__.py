"""One process, no accelerator needed."""
