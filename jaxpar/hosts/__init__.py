"""Many processes as one run: `distributed` joins them, `launch` starts them."""
