"""The functions of reference.py in C++ for CPUs and in Triton for CUDA. Without it all is slow."""

NEEDS = ()
ADDS = {
    "layouts": {"cpu": "backends.strips:pack_on_cpu", "cuda": "backends.planes:pack_on_cuda"},
    "backend": {"cpu": "backends.chosen:on_cpu", "cuda": "backends.chosen:on_cuda"},
}
