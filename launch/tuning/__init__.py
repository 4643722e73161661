"""Tries layouts of a config by short training runs, or chooses one by predicted memory."""
