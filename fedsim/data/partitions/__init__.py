"""Division of the training examples among clients: drawn, by a column or file, or by a function."""
