"""The built-in tasks, each in its own folder."""
