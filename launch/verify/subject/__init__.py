"""`triaxis verify --subject`: verify the layouts of another engine instead of ours."""
