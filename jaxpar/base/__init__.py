"""What all else stands on: names, checks, files, text, trees of arrays; nothing here knows a model."""
