"""Results shown to people: the HTML report of a run, figures, and terminal output."""
