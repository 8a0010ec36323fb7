"""The prefix cache on disk: blocks of latents that outlive an engine and its process."""
