"""The collectors, each a file or package that reads one source. `table.py` lists them."""
