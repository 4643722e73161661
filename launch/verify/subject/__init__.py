"""Verifies the layouts of another engine instead of ours, for `triaxis verify --subject`."""
