"""Grafana dashboards as code, alert rules, and a stack to start them with; see README.md beside this file."""
