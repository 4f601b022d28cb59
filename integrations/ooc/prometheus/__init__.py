"""Prometheus metrics of a running program; see `catalogue.py` for what there is."""
