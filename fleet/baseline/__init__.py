"""Accept runs into baselines, and compare runs with baselines or earlier runs."""
