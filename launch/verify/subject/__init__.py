"""`triaxis verify --subject`: another engine takes our engine's place."""
