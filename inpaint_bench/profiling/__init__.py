"""Profiles of a step by kernels. Nothing here measures speed: a profiled step is slower than one that counts."""
