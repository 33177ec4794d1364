"""The server side of secure aggregation: leader, helper, masked sum, record of opened sums."""
