"""``python -m hisparsim.cli``: the same as the console script."""

from hisparsim.cli.app import main

if __name__ == "__main__":
    main()
