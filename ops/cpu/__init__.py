"""C++ for CPUs: how it is built, what its weights look like, and its sources."""
