"""What mixers cost beside their linears: softmax attention, MLA, and those that keep a state."""
