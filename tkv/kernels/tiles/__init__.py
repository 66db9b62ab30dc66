"""Parts that the kernels share: small @triton.jit functions, each with one meaning."""
