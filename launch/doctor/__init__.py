"""Collect facts about every rank's node, measure paths, and name the nodes that are out of line."""
