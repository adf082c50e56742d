"""Parts of mismatch.py and correction.py."""
