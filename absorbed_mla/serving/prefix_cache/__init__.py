"""The prefix cache on disk: latent blocks that are kept beyond an engine and its process."""
