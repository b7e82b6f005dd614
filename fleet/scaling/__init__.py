"""Scaling studies: select the next cell to measure, evaluate the records, and render the results."""
