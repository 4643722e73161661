"""Find out what a run has read: the documents in a step, tokens read twice or left out. Training ranks import nothing from here."""
