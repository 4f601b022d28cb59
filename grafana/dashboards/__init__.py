"""The dashboards, one a file; each has `make`, which returns its JSON."""
