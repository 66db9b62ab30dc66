"""The public functions, one a file: they check, allocate and launch; what is computed stands in `tkv.kernels`."""
