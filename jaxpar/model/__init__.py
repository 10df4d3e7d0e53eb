"""A task, its model of stacked layers, and what is known of them from shapes."""
