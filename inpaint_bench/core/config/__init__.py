"""The configuration: its keys with types and limits, the files they come from, recipes and sites."""
