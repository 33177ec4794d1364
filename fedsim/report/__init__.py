"""Results for people: the HTML report of a run, figures, and output in the terminal."""
