"""`python -m autoshard` is the `autoshard` command."""

from autoshard.cli.commands import main

if __name__ == "__main__":
    main()
