"""What a suite is: its tasks, its protocol, its data."""
