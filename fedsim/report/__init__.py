"""Code that shows results to people: the HTML report of a run, figures, and terminal output."""
