/* A CUDA driver that only keeps accounts. Under torch's own libc10_cuda.so it stands in for libcudart.so.13, so that the
   allocator of a CUDA build of torch runs where there is no GPU: memory is a number, and work on a stream is done when
   `standin_finish` says so. STANDIN_BYTES is what the device has; STANDIN_FALLING lets addresses fall, which else rise. */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GRANULARITY = 2 << 20, MOST_SEGMENTS = 1 << 16, MOST_STREAMS = 256 };

typedef struct {
    uint64_t stream, number;
} Event;

static size_t used, total;
static int falling;
static uint64_t next_address = 1ull << 44;
static struct {
    uint64_t address;
    size_t size;
} segments[MOST_SEGMENTS];
static int num_segments;
static uint64_t recorded[MOST_STREAMS], finished[MOST_STREAMS]; /* events of each stream, and how many of them are past */

static size_t whole(size_t size)
{
    return (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
}

__attribute__((constructor)) static void begin(void)
{
    const char *bytes = getenv("STANDIN_BYTES");
    total = bytes ? strtoull(bytes, NULL, 10) : 1ull << 40;
    falling = getenv("STANDIN_FALLING") != NULL;
}

void standin_finish(uint64_t stream)
{
    finished[stream] = recorded[stream];
}

static uint64_t place(size_t size)
{
    uint64_t address = next_address - (falling ? size : 0);
    next_address = falling ? address : address + size;
    return address;
}

/* -- memory */

cudaError_t cudaMalloc(void **address, size_t size)
{
    size = whole(size);
    if (used + size > total || num_segments == MOST_SEGMENTS)
        return cudaErrorMemoryAllocation;
    used += size;
    segments[num_segments].address = place(size);
    segments[num_segments].size = size;
    *address = (void *)segments[num_segments++].address;
    return cudaSuccess;
}

cudaError_t cudaFree(void *address)
{
    for (int i = num_segments - 1; i >= 0; i--)
        if (segments[i].address == (uint64_t)address) {
            used -= segments[i].size;
            segments[i] = segments[--num_segments];
            return cudaSuccess;
        }
    return cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all)
{
    *all = total;
    *left = total - used;
    return cudaSuccess;
}

/* Of expandable segments: pages are made, mapped into reserved addresses, and released. */

static CUresult make(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *how, unsigned long long flags)
{
    if (used + size > total)
        return CUDA_ERROR_OUT_OF_MEMORY;
    used += size;
    *handle = size;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    used -= handle;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    *address = place(whole(size));
    return CUDA_SUCCESS;
}

static CUresult attribute(int *value, CUdevice_attribute name, CUdevice device)
{
    *value = 0;
    return CUDA_SUCCESS;
}

static CUresult explain(CUresult error, const char **text)
{
    *text = "refused by the stand-in for a driver";
    return CUDA_SUCCESS;
}

static CUresult nothing(void)
{
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **entry, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found)
{
    *entry = !strcmp(name, "cuMemCreate")            ? (void *)make
             : !strcmp(name, "cuMemRelease")         ? (void *)release
             : !strcmp(name, "cuMemAddressReserve")  ? (void *)reserve
             : !strcmp(name, "cuDeviceGetAttribute") ? (void *)attribute
             : !strcmp(name, "cuGetErrorString")     ? (void *)explain
                                                     : (void *)nothing;
    if (found)
        *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* -- streams: calls.cpp makes them of numbers, shifted by eight bits */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    Event *e = (Event *)event;
    e->stream = (uint64_t)stream >> 8;
    e->number = ++recorded[e->stream];
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    Event *e = (Event *)event;
    return e->number <= finished[e->stream] ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    Event *e = (Event *)event;
    if (finished[e->stream] < e->number)
        finished[e->stream] = e->number;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}

/* -- the device */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    properties->totalGlobalMem = total;
    properties->major = 8;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return "standInError";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return "refused by the stand-in for a driver";
}
