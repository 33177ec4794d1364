"""Run the `fedsim` command as `python -m fedsim`."""

from fedsim.cli import main

if __name__ == "__main__":
    main()
