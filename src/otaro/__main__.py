"""`python -m otaro`: the command line, where a launcher such as torchrun wants a module."""

from otaro.cli.main import main

if __name__ == "__main__":
    main()
