"""Alerts for Prometheus: rules made from the criteria, whose limits exist only in the packs, and rules without a criterion."""
