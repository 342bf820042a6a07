"""Acceptance: what a checkpoint promises, and how each promise is put to the test."""
