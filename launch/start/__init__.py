"""From a command line to running ranks."""
