"""`python -m fedsim`: the `fedsim` command."""

from fedsim.cli import main

if __name__ == "__main__":
    main()
