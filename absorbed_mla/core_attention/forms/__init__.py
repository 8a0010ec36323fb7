"""The two executions of latent attention: absorbed and expanded."""
