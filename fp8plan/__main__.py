"""`python -m fp8plan`, for when the command is not on PATH."""

from fp8plan.cli import main

if __name__ == "__main__":
    main()
