"""fp8plan inside trainers, with a module for each. Only its module imports a trainer's library."""
