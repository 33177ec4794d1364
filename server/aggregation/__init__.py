"""How client updates become the next global model: the mean, aggregators and Flower strategies."""
