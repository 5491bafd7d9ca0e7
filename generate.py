"""Generate text."""

from options import run_program

if __name__ == "__main__":
    run_program("generate")
