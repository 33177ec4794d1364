"""What `same_results.py` compares: experiments, their performance, and their results as text."""
