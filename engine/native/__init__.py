"""Kernels in C++ for CPUs with a matrix unit, and how they are built and called."""
