"""`python -m quantkit` is the console script."""

from quantkit.cli import main

if __name__ == "__main__":
    main()
