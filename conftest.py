"""Nothing to set up: the plugin comes from its entry point, the suites use its public fixtures."""
