"""A test of the controller of TIS and MIS thresholds: a simulated loop whose exact gradient is known.

python -m benchmarks.control.run            from the root of the repository: results.json, table.md, control.png
"""
