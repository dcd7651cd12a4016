/* What else torch's libc10_cuda.so names: calls that may do nothing, calls that its allocator never makes, and, of the
   management library, what it asks about other GPUs and, out of memory, about other processes. There are none. */

#include <stdlib.h>

#define NOTHING(name) int name(void) { return 0; }
#define NEVER(name) int name(void) { abort(); }

NOTHING(cudaSetDevice) NOTHING(cudaGetLastError) NOTHING(cudaDeviceSynchronize) NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamQuery) NOTHING(cudaStreamWaitEvent) NOTHING(cudaThreadExchangeStreamCaptureMode)

NEVER(cudaDeviceCanAccessPeer) NEVER(cudaDeviceEnablePeerAccess) NEVER(cudaDeviceGetDefaultMemPool)
NEVER(cudaEventElapsedTime) NEVER(cudaFreeAsync) NEVER(cudaGraphNodeGetDependencies)
NEVER(cudaIpcCloseMemHandle) NEVER(cudaIpcGetMemHandle) NEVER(cudaIpcOpenMemHandle) NEVER(cudaMallocAsync)
NEVER(cudaMemPoolGetAttribute) NEVER(cudaMemPoolSetAccess) NEVER(cudaMemPoolSetAttribute) NEVER(cudaMemPoolTrimTo)
NEVER(cudaMemcpy) NEVER(cudaMemcpyAsync) NEVER(cudaMemcpyPeerAsync) NEVER(cudaStreamCreateWithPriority)
NEVER(cudaStreamGetCaptureInfo)

NOTHING(nvmlInit_v2) NOTHING(nvmlDeviceGetHandleByPciBusId_v2) NOTHING(nvmlDeviceGetNvLinkRemoteDeviceType)
NOTHING(nvmlDeviceGetNvLinkRemotePciInfo_v2) NOTHING(nvmlSystemGetCudaDriverVersion_v2) NOTHING(nvmlDeviceGetGpuFabricInfoV)

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count)
{
    *count = 0;
    return 0;
}
