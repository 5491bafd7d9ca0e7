// Products, attention and the choice of tokens, as one unit: together they take as long to compile as operators.cpp.

#include "attention.cpp"
#include "choice.cpp"
#include "linear.cpp"
#include "quantized.cpp"
