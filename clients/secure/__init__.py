"""The client side of secure aggregation: encode, mask or share, and seal an update."""
