"""The coefficients of one GPU with one engine version."""
