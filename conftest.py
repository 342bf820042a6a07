"""The plugin comes from its entry point; the tests of the plugin run pytest inside pytest."""

pytest_plugins = ["pytester"]
