"""Parts of the report's page, each from the files of the run."""
