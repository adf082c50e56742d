"""fp8plan inside of trainers, a module for each. A trainer's library is imported with its module only."""
