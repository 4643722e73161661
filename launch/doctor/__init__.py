"""`triaxis doctor`: collect facts about every rank's node, measure paths between ranks, and name the nodes that are out of line."""
