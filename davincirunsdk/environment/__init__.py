"""Variables of a worker."""
