"""Runs the kernels of both languages on the CPU, from the PTX that their compilers make."""
