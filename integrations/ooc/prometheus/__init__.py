"""Prometheus metrics of a running program; `catalogue.py` lists them."""
