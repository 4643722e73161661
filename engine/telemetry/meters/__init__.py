"""Measures a run's steps and adds the numbers to the steps' records. `table.py` lists the meters."""
