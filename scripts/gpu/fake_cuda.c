/* The calls of the CUDA runtime and driver by which torch looks for a GPU (fake_cuda.py), in one library.

   cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fake_cuda.c; LD_PRELOAD=libcuda.so.1 */
#include <stddef.h>
#define ANSWER(name, ...) int name(__VA_ARGS__)

ANSWER(cuInit, unsigned flags) { return 0; }
ANSWER(cuDeviceGetCount, int *count) { *count = 1; return 0; }
ANSWER(cuDriverGetVersion, int *version) { *version = 13000; return 0; }
ANSWER(cuDevicePrimaryCtxGetState, int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

ANSWER(cudaDriverGetVersion, int *version) { *version = 13000; return 0; }
ANSWER(cudaGetDeviceCount, int *count) { *count = 1; return 0; }
ANSWER(cudaGetDevice, int *device) { *device = 0; return 0; }
ANSWER(cudaSetDevice, int device) { return 0; }
ANSWER(cudaGetLastError, void) { return 0; }
ANSWER(cudaPeekAtLastError, void) { return 0; }
ANSWER(cudaDeviceSynchronize, void) { return 0; }
ANSWER(cudaStreamIsCapturing, void *stream, int *status) { *status = 0; return 0; }
ANSWER(cudaDeviceGetStreamPriorityRange, int *least, int *greatest) { *least = *greatest = 0; return 0; }
