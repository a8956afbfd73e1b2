"""The search: see docs\/architecture.md; `tune.py` is the loop."""
