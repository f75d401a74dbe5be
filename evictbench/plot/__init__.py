"""Figures of runs and traces."""
