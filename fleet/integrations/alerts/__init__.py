"""Alerts for Prometheus: the criteria as rules, so that a limit stands in the packs alone, and what no criterion can say."""
