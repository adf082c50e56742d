"""What weight matrices cost: dense linears, and the routed experts."""
