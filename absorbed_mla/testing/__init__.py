"""What measurements need: the recall of a selection, the weights of tokens that are drawn."""
