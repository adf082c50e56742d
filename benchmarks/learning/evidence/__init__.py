"""The tables of docs/evidence that are made of the committed runs.

python -m benchmarks.learning.evidence      prints them; `make tables` writes them into the pages
"""
