"""One module per subcommand of `triaxis`; the table of their names is in `launch/cli.py`."""
