"""`python -m segtrain`."""

from segtrain.cli import main

if __name__ == "__main__":
    main()
