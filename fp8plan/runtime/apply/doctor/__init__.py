"""The doctor finds the real settings and the faults of an engine or a server.

`observe` fills an Observed (from an engine or vllm.LLM here, a server over HTTP, or a run's files). `checks` are pure
functions from it to one Finding each, and `doctor` puts both together.
"""
