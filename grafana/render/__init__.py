"""Pictures of the dashboards, drawn with Grafana's own UI components from live data."""
