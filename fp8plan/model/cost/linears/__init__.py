"""The cost of weight matrices: dense linears, and the routed experts."""
