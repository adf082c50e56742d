"""The policies that are trained, their tasks, and how each is made.

python -m benchmarks.learning.policies NAME FOLDER [--device cuda] [--seed N]
"""
