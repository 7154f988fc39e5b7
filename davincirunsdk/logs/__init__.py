"""From a worker's pipe to files, streams and events."""
