// Products, attention and sampling, as one unit: together they take as long to compile as operators.cpp.

#include "attention.cpp"
#include "linear.cpp"
#include "quantized.cpp"
#include "sampling.cpp"
