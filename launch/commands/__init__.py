"""One module per `triaxis` subcommand."""
