"""Places inside of other trainers."""
