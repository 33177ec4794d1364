"""What an experiment would spend, run and read, said before anything is trained."""
