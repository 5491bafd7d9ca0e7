"""C++ operators for CPUs: their sources, their build and the layouts of their weights."""
