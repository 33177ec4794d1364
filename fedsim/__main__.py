"""Entry point of `python -m fedsim`, which runs the `fedsim` command."""

from fedsim.cli import main

if __name__ == "__main__":
    main()
