"""Generator of the Grafana dashboards: `python -m deploy.grafana` writes dashboards/, which is in version control."""
