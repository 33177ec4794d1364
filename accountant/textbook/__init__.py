"""Published results for comparison and teaching: classical bounds, moments accountant, PATE."""
