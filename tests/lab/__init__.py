"""Run a multi-host SSH lab on one machine; see `lab.py`."""
