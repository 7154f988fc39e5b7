"""What outlives a worker or the launcher: found by its mark, ended, by the guardian too."""
