"""What lies on disk, and reading it back; without torch."""
