"""What tests and measurements need: counts of traffic, the weights of tokens that are drawn."""
