"""A live vLLM engine that runs the precision of a plan."""
