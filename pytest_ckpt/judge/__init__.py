"""Judging records: statistics, baselines, bounds and findings; pure functions that start no process."""
