"""`python -m hisparsim_kernels`: the commands of `cli`."""

from hisparsim_kernels.cli import app

if __name__ == "__main__":
    app(prog_name="hisparsim_kernels")
