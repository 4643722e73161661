"""`triaxis doctor`: facts about every rank's node, measured paths between ranks, and the nodes that are out of line."""
