"""Rules that relate fields to each other: tables in `needs.py` and `sizes.py`, else a file per section; `check.py` runs all."""
