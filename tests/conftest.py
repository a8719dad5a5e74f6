"""Shared by all tests."""

pytest_plugins = ["tests.testbed.fixtures"]
