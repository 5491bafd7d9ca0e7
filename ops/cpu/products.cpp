// Matmuls, attention and sampling as one unit: they take as long to compile as operators.cpp.

#include "attention.cpp"
#include "matmul.cpp"
#include "sampling.cpp"
