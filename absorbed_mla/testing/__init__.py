"""What tests and measurements need of Megatron: standard MLA on any machine, counts of traffic."""
