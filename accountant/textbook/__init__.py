"""Published privacy bounds for comparison and teaching: classical, moments accountant and PATE."""
