"""What users run: benchmarks of checkpoint saves, written with public fixtures only."""
