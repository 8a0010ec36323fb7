"""Ways to train that users combine with this attention, each beside the plain run of its layout."""
