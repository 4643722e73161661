"""The reads of a run: documents of a step, tokens read twice or left out. Nothing here is imported by a training rank."""
