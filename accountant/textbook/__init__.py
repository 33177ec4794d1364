"""Published results for comparison and teaching: classical bounds, moments accountant and PATE."""
