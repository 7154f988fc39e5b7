"""What a training script may import: light, without dependencies, and without effect outside a job."""
