"""The check of the dashboards against Grafana's own types."""
