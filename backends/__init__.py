"""The functions of reference.py in C++ for CPUs and in Triton for CUDA. Without it all is slow."""

NEEDS = ()
ADDS = {
    "layouts": {"cpu": "backends.strips:pack_on_cpu", "cuda": "backends.planes:pack_on_cuda"},
    "machine": {
        "block planes": "backends.block_planes",
        "blocks": "backends.blocks",
        "check_own": "backends.cpp.build:check_own",
        "cpu_operators_are_loaded": "backends.library:cpu_operators_are_loaded",
        "describe_cpu": "backends.library:describe_cpu",
        "has_cpu_operators": "backends.library:has_cpu_operators",
        "pack_codes": "backends.weight:pack_codes",
        "fault_of_tiles": "backends.cpp.tiles:fault_of_hardware",
        "gain_of_fetching": "backends.cpp.fetching:gain_of_fetching",
        "huge_pages": "backends.cpp.pages:HugePages",
        "set_plain": "backends.library:set_plain",
        "single_torch_thread": "backends.library:single_torch_thread",
        "usual_topk_and_size": "backends.library:usual_topk_and_size",
    },
    "functions": {"cpu": "backends.cpp.functions", "cuda": "backends.triton.functions"},
    "backend": {"cpu": "backends.chosen:on_cpu", "cuda": "backends.chosen:on_cuda"},
}
