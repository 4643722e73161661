"""`triaxis simulate`: the actions and transfers of a step on one axis of time."""
