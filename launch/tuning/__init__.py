"""Short training runs of a config in several layouts, and the choice of a layout by predicted memory."""
