"""What a person reads: the HTML report and the terminal."""
