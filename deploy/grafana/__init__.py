"""Rackproof's dashboards for Grafana, made by `python -m deploy.grafana` and checked in under dashboards/."""
