"""More than one node from one call: an engine places one agent per node and carries the messages."""
