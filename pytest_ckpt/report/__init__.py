"""Reports from records: lines for a terminal, on any machine and without torch."""
