"""The history of a fleet: the figures and causes of many runs in Parquet files, and the questions about them."""
