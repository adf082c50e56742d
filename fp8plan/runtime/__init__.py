"""The part of fp8plan that needs torch, vLLM or a GPU. Functions import both, so importing this loads neither."""
