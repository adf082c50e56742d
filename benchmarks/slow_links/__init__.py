"""Benchmarks of weight syncs over slow links: a real model's steps, shaped links, and the bits after fifty steps."""
