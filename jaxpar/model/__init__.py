"""What is trained: a task, its model of layers in a stack, and all that is known of them from shapes."""
