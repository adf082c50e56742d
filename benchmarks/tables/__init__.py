"""Tables of README.md and docs/, from committed measurements. `make tables` writes them."""
