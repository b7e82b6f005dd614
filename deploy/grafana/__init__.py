"""Generate the Grafana dashboards: `python -m deploy.grafana` writes dashboards/, which is checked in."""
