"""How good is the controller of TIS and MIS thresholds? A simulator of the loop with an exact gradient to compare with.

python -m benchmarks.control.run            from the root of the repository: results.json, table.md, control.png
"""
