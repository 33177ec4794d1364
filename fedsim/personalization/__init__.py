"""Personal models: made by each client from the final global model, and never released."""
