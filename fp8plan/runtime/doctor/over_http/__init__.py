"""A `vllm serve` as the doctor sees it: a client that trusts no answer, the answers' types, and what they tell."""
