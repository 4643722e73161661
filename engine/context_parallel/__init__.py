"""Context parallelism, which cuts each sample over ranks.

For attention, the ranks gather keys and values or exchange heads.
"""
