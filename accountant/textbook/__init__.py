"""Results of the literature beside the main accountants: classical bounds, moments, PATE."""
