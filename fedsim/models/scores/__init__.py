"""Scores of a model on the public test set: metrics by name, the confusion matrix, each class."""
