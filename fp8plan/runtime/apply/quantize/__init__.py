"""Blockwise FP8 quantisation, equal bit for bit to what vLLM loads."""
