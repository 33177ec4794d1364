"""The server side of secure aggregation: leader, helper, masked sum, opened sums."""
