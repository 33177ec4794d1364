"""Personal models, which each client makes from the final global model and never releases."""
