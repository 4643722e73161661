"""Tries a config in several layouts by short training runs, or chooses its layout by predicted memory alone."""
