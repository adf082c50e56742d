"""A `vllm serve` as the doctor sees it: a client that trusts no answer, and the types and meaning of the answers."""
