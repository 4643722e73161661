"""Meters, which measure a run's steps and add the numbers to the steps' records; `table.py` lists them."""
