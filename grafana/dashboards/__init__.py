"""The dashboards, one in each module. Each module has `make`, which returns the dashboard's JSON."""
