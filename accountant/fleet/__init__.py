"""ε of many clients computed together."""
