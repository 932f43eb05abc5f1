"""Kernels: one folder per operation, with its definition in torch and an implementation in Triton. Inference only."""
