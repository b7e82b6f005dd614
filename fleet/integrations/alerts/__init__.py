"""Generate the alerts for Prometheus from a table of alerts and the criteria packs, which define the limits."""
