"""``python -m rlcore``."""

from rlcore.cli import main

if __name__ == "__main__":
    main()
