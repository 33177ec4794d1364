"""Privacy filters: whether a budget affords the next release."""
