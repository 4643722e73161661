"""Cuts each sample over ranks (context parallelism).

For attention, the ranks gather keys and values or exchange heads.
"""
