"""One module per `triaxis` subcommand; `launch/cli.py` lists their names."""
