"""Does a layout train the same model? What differs between one process and many ranks, by name, and what that looks like."""
