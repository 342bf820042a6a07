"""Acceptance: each test is a promise that a checkpoint makes, put to the test on real ranks, files and faults."""
