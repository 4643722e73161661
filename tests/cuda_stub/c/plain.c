// Functions of all libraries that only say that all is well, or only tell a number. They declare no argument that they
// do not read, as no header declares them here.
#include <stddef.h>
#include "card.h"

#define RETURNS(name, type, value) \
  type name(void) {                \
    return value;                  \
  }
#define SUCCEEDS(name) RETURNS(name, int, 0)

// Tells by its first argument.
#define TELLS(name, type, value) \
  int name(type *to) {           \
    *to = value;                 \
    return 0;                    \
  }

// Tells 0 by its second argument.
#define TELLS_ZERO(name)        \
  int name(void *of, int *to) { \
    *to = 0;                    \
    return 0;                   \
  }

// ---- the runtime
RETURNS(__cudaInitModule, char, 1)
SUCCEEDS(__cudaRegisterFatBinaryEnd)
SUCCEEDS(__cudaRegisterVar)
SUCCEEDS(__cudaUnregisterFatBinary)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaStreamDestroy)
TELLS(cudaDeviceCanAccessPeer, int, 1)
TELLS(cudaDriverGetVersion, int, 13000)
TELLS(cudaGetDeviceCount, int, card_count())
TELLS(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int, 2)
TELLS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int, 2)
TELLS(cudaRuntimeGetVersion, int, 13000)

// ---- the driver; its one context is the number 0x1000
SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuInit)
SUCCEEDS(cuMemSetAccess)
SUCCEEDS(cuModuleUnload)
TELLS(cuCtxGetCurrent, void *, (void *)0x1000)
TELLS(cuCtxPopCurrent_v2, void *, (void *)0x1000)
TELLS(cuDeviceGetCount, int, card_count())
TELLS(cuDevicePrimaryCtxRetain, void *, (void *)0x1000)
TELLS(cuDriverGetVersion, int, 13000)
TELLS(cuMemGetAllocationGranularity, size_t, 2 << 20)
TELLS(cuModuleLoad, void *, (void *)0x2000)
TELLS(cuOccupancyMaxActiveClusters, int, 16)

// ---- cuBLAS and cuBLASLt
RETURNS(cublasLtGetVersion, size_t, 130100)
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasSetWorkspace_v2)
TELLS_ZERO(cublasGetMathMode)
TELLS_ZERO(cublasGetPointerMode_v2)

// ---- cuDNN
RETURNS(cudnnGetCudartVersion, size_t, 13000)
RETURNS(cudnnGetErrorString, const char *, "an error of the stub's cuDNN")
RETURNS(cudnnGetVersion, size_t, 92000)
SUCCEEDS(cudnnBackendFinalize)
SUCCEEDS(cudnnBackendSetAttribute)

// ---- NCCL
RETURNS(ncclGetLastError, const char *, "")
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclRedOpDestroy)
TELLS(ncclGetVersion, int, 22907)
TELLS(ncclRedOpCreatePreMulSum, int, 5)
TELLS_ZERO(ncclCommGetAsyncError)

// ---- NVML. 3, NVML_ERROR_NOT_SUPPORTED: the card has no NVLink.
RETURNS(nvmlDeviceGetNvLinkRemoteDeviceType, int, 3)
RETURNS(nvmlDeviceGetNvLinkRemotePciInfo_v2, int, 3)
SUCCEEDS(nvmlDeviceGetGpuFabricInfoV)
SUCCEEDS(nvmlInitWithFlags)
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlShutdown)
TELLS(nvmlDeviceGetCount_v2, int, card_count())
TELLS(nvmlSystemGetCudaDriverVersion_v2, int, 13000)
TELLS_ZERO(nvmlDeviceGetComputeRunningProcesses)
