"""fp8plan inside of trainers, one module for each. A trainer's library is imported with its module, never with fp8plan."""
