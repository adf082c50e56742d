"""The cost of mixers beside their linears: softmax attention, MLA, and those that keep a state."""
