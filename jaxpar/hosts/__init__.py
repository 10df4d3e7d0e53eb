"""Many processes as one run: how they find each other, what starts them, what stands in their way."""
