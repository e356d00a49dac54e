"""Execute the simulator's plans on real tensors."""
