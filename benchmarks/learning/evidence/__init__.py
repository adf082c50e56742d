"""The tables of docs/evidence/learning.md, from the committed runs.

python -m benchmarks.learning.evidence      prints them; `make tables` writes them into the page
"""
