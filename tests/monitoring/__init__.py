"""Dashboards and alerts: held to the metrics that there are, and run against a real Prometheus."""
