"""The doctor: what an engine or a server really runs, and what is wrong with it.

`observe` fills an Observed (of an engine or vllm.LLM here, of a server over HTTP, of a run's files), `checks` are pure
functions from it to one Finding each, and `doctor` puts them together.
"""
