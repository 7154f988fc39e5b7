"""One node's workers, from spawn to nothing left."""
