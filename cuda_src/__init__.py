"""The kernels in CUDA C++, as package data. README.md lists them in reading order."""
