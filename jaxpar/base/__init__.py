"""Basic tools that all other packages use: names, checks, files, text and trees of arrays."""
