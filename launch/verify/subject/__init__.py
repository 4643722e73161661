"""`triaxis verify --subject`: another engine in place of ours."""
