"""A client's privacy budget: its plan, its noise, and the steps that it affords."""
