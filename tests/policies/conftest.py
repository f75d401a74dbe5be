"""Nothing of its own; it puts this folder on the path of the tests in the folders below."""
