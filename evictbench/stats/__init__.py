"""Intervals, paired differences and power: mathematics alone."""
