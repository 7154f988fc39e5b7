"""Which nodes and devices exist, and which node we are."""
