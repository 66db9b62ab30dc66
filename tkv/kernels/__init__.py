"""The kernels: @triton.jit functions only. Importing a module of this package imports Triton."""
