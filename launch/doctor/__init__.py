"""`triaxis doctor`: facts about every rank's node, measured paths between ranks, and who is out of line."""
